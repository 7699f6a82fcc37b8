# Doxygen reads the headers without the inline namespace of target.hpp: its names are those of momentum_delta.
s/^inline namespace MOMENTUM_DELTA_TARGET {$//
s/^}  \/\/ namespace MOMENTUM_DELTA_TARGET$//
