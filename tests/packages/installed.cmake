# Installs, and expects every header of the tree, and no other.
include(${CMAKE_CURRENT_LIST_DIR}/compare.cmake)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BINARY} --prefix ${OUTSIDE}/prefix COMMAND_ERROR_IS_FATAL ANY)

file(GLOB_RECURSE in_tree RELATIVE ${SOURCE}/include ${SOURCE}/include/*.hpp)
file(GLOB_RECURSE installed RELATIVE ${OUTSIDE}/prefix/include ${OUTSIDE}/prefix/include/*)
compare_files("What the file set of CMakeLists.txt installs" "${installed}" "${in_tree}")
