#!/usr/bin/env bash
# What including the whole library costs: tests/compile_time.sh [COMPILER [EIGEN]] prints the processor time of a
# translation unit that includes momentum_delta.hpp over that of one that includes <Eigen/Dense>, each the best of
# three interleaved runs. Fails from 2 on.
set -euo pipefail
compiler=${1:-g++} eigen=${2:-/usr/include/eigen3}
include=$(cd "$(dirname "$0")/../include" && pwd)
TIMEFORMAT=%U
seconds() { # header
  { time "$compiler" -std=c++20 -O2 -I "$include" -isystem "$eigen" -x c++ -include "$1" -c /dev/null -o /dev/null; } 2>&1
}
for _ in 1 2 3; do
  echo "$(seconds Eigen/Dense) $(seconds momentum_delta/momentum_delta.hpp)"
done | awk '
  NF != 2 || $1 !~ /^[0-9.]+$/ || $2 !~ /^[0-9.]+$/ { print "no times: " $0; failed = 1; exit }
  NR == 1 || $1 < eigen { eigen = $1 }
  NR == 1 || $2 < ours { ours = $2 }
  END {
    if (failed || NR == 0) exit 1
    printf "momentum_delta.hpp %.2f s, Eigen/Dense %.2f s: %.2f\n", ours, eigen, ours / eigen
    exit ours >= 2 * eigen
  }'
