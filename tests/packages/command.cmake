# Runs the compiler's command of README.md that holds WORDS, with this compiler and Eigen and without optimisation;
# then its program.
file(STRINGS ${README} command REGEX "^g\\+\\+ .*${WORDS}")
list(LENGTH command count)
if(NOT count EQUAL 1)
  message(FATAL_ERROR "README.md has ${count} lines `g++ .. ${WORDS}`")
endif()
string(REGEX REPLACE "^g\\+\\+" "${COMPILER}" command "${command}")
string(REPLACE /usr/include/eigen3 "${EIGEN}" command "${command}")
file(MAKE_DIRECTORY ${OUTSIDE}/build)
set(program ${OUTSIDE}/build/${NAME})
execute_process(COMMAND sh -euxc "${command} -O0 -o ${program}; ${program}" WORKING_DIRECTORY ${OUTSIDE}
  COMMAND_ERROR_IS_FATAL ANY)
