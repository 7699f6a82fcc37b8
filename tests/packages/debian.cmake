# Runs the workflow preset `package` in the unpacked source archive, and unpacks the Debian package that it makes.
include(${CMAKE_CURRENT_LIST_DIR}/compare.cmake)
set(ENV{CMAKE_GENERATOR} ${GENERATOR})
set(ENV{CXX} ${COMPILER})
set(ENV{Eigen3_DIR} ${Eigen3_DIR})
set(packages ${OUTSIDE}/momentum_delta/build/package)
set(debian ${packages}/libmomentum-delta-dev_${VERSION}_all.deb)
execute_process(COMMAND ${CMAKE_COMMAND} --workflow --preset package WORKING_DIRECTORY ${OUTSIDE}/momentum_delta
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${DPKG_DEB} -x ${debian} ${OUTSIDE}/debian COMMAND_ERROR_IS_FATAL ANY)

execute_process(COMMAND ${DPKG_DEB} -f ${debian} OUTPUT_VARIABLE fields COMMAND_ERROR_IS_FATAL ANY)
foreach(line "Package: libmomentum-delta-dev" "Version: ${VERSION}" "Architecture: all"
    "Depends: libeigen3-dev \\(>= 3.4\\)")
  if(NOT "\n${fields}" MATCHES "\n${line}\n")
    message(FATAL_ERROR "The Debian package does not say ${line}, but\n${fields}")
  endif()
endforeach()
file(GLOB_RECURSE files RELATIVE ${OUTSIDE}/debian ${OUTSIDE}/debian/*)
file(GLOB_RECURSE expected RELATIVE ${SOURCE}/include ${SOURCE}/include/*.hpp)
list(TRANSFORM expected PREPEND usr/include/)
list(APPEND expected usr/share/cmake/momentum_delta/momentum_delta-config.cmake
  usr/share/cmake/momentum_delta/momentum_delta-config-version.cmake
  usr/share/cmake/momentum_delta/momentum_delta_targets.cmake
  usr/share/doc/libmomentum-delta-dev/copyright
  usr/share/pkgconfig/momentum_delta.pc)
compare_files("The Debian package" "${files}" "${expected}")

# The archive of the archive is the archive.
file(ARCHIVE_EXTRACT INPUT ${packages}/momentum_delta-${VERSION}.tar.gz DESTINATION ${packages}/again)
file(GLOB_RECURSE again RELATIVE ${packages}/again/momentum_delta-${VERSION} ${packages}/again/*)
file(GLOB_RECURSE archive RELATIVE ${OUTSIDE}/momentum_delta ${OUTSIDE}/momentum_delta/*)
list(FILTER archive EXCLUDE REGEX "^build/")
compare_files("A source archive made from a source archive" "${again}" "${archive}")
