# Makes the source archive, unpacks it, and expects in it what git knows, the top level's dot-files aside.
include(${CMAKE_CURRENT_LIST_DIR}/compare.cmake)
get_filename_component(bin ${CMAKE_COMMAND} DIRECTORY)
set(archive ${OUTSIDE}/momentum_delta-${VERSION}.tar.gz)
file(GLOB old ${OUTSIDE}/*.tar.gz)  # of another version
file(REMOVE ${archive} ${old})
execute_process(COMMAND ${bin}/cpack --config ${BINARY}/CPackSourceConfig.cmake -B ${OUTSIDE}
  COMMAND_ERROR_IS_FATAL ANY)
file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${OUTSIDE})
file(RENAME ${OUTSIDE}/momentum_delta-${VERSION} ${OUTSIDE}/momentum_delta)
file(COPY ${OUTSIDE}/momentum_delta/examples DESTINATION ${OUTSIDE})

file(GLOB_RECURSE packed RELATIVE ${OUTSIDE}/momentum_delta ${OUTSIDE}/momentum_delta/*)
file(GLOB top RELATIVE ${OUTSIDE}/momentum_delta ${OUTSIDE}/momentum_delta/*)
list(REMOVE_ITEM top include tests examples bench CMakeLists.txt CMakePresets.json README.md CONTRIBUTING.md
  CHANGELOG.md LICENSE)
if(top)
  message(FATAL_ERROR "The source archive has at its top level: ${top}")
endif()
if(GIT AND EXISTS ${SOURCE}/.git)
  execute_process(COMMAND ${GIT} -c core.quotePath=off ls-files --cached --others --exclude-standard
    WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "\n" ";" known "${known}")
  list(FILTER known EXCLUDE REGEX "^([.]|$)")
  compare_files("The source archive" "${packed}" "${known}")
else()
  message("No git: the source archive's files are not compared with it")
endif()
