# Installs, and expects every header of the tree, and no other.
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BINARY} --prefix ${OUTSIDE}/prefix COMMAND_ERROR_IS_FATAL ANY)

file(GLOB_RECURSE in_tree RELATIVE ${SOURCE}/include ${SOURCE}/include/*.hpp)
file(GLOB_RECURSE installed RELATIVE ${OUTSIDE}/prefix/include ${OUTSIDE}/prefix/include/*)
if(NOT in_tree STREQUAL installed)
  set(missing ${in_tree})
  list(REMOVE_ITEM missing ${installed})
  list(REMOVE_ITEM installed ${in_tree})
  message(FATAL_ERROR "Not in the file set of CMakeLists.txt: ${missing}\ninstalled, not in include: ${installed}")
endif()
