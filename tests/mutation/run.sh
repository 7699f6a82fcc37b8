#!/usr/bin/env bash
# Changes one term of the kernels at a time and shows that a test fails for each: tests/mutation/run.sh [jobs [header[:line] ..]]
# Needs g++ (or CXX), Eigen, Catch2 and nlohmann_json where INCLUDES (default -isystem /usr/include/eigen3) finds
# them; LIBS: what else to link, for Catch2 3 "-lCatch2Main -lCatch2".
# Prints the survivors and the score; fails if a mutant survives that survivors.txt gives no reason for.
set -euo pipefail
jobs=${1:-$(nproc)}
shift $(($# > 0))
cd "$(dirname "$0")/../.."
root=$PWD here=$PWD/tests/mutation
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export root here work
echo "-std=c++20 -O1 ${INCLUDES:--isystem /usr/include/eigen3} '-DTEST_DATA_DIR=\"$root/tests/data\"'" > "$work/flags"
export compile="${CXX:-g++} @$work/flags"

# header: what is compiled anew for its mutants, kernels (see kernels.cpp) and tests
all="decay_mask:RULE+SCAN+SCAN_DOUBLE+decay_mask+activations recurrent/forward:sweep recurrent/fused:RULE recurrent/step:RULE recurrent/backward:RULE
  chunk/forward:RULE chunk/backward:RULE saved:RULE detail/head:RULE detail/head_gradients:RULE detail/panel:RULE+SCAN+SCAN_DOUBLE detail/tile:RULE
  selective_scan/panel:SCAN selective_scan/forward:SCAN selective_scan/backward:SCAN
  layer/gated_norm:LAYER layer/short_convolution:LAYER layer/pass:LAYER
  activations:activations detail/activation_rows:SCAN+LAYER+activations gates:gates normalize:normalize"
tests="golden decay_mask batch backward properties threads sweep poison selective_scan/forward selective_scan/backward
  selective_scan/call layer gates normalize activations traps"

object() { echo "$work/${1//\//_}.o"; }
export -f object

# What no mutant changes.
{
  echo "$compile -I include -c tests/support/main.cpp -o $work/main.o"
  for types in float double bfloat16 half; do
    echo "$compile -I include -c examples/kernels/$types.cpp -o $work/kernels_$types.o"
  done
  for calls in calls calls_float calls_double calls_half calls_bfloat16; do
    echo "$compile -I include -c tests/support/$calls.cpp -o $work/$calls.o"
  done
  for test in $tests; do echo "$compile -I include -c tests/$test.test.cpp -o $(object "$test")"; done
} | xargs -P "$jobs" -d '\n' -I{} bash -c '{}'
for test in $tests; do objects+=" $(object "$test")"; done
export objects
link() { # program, and the objects of a mutant: of equal functions the linker keeps the first
  ${CXX:-g++} -pthread -o "$1" "$work/main.o" "${@:2}" "$work"/kernels_{float,double,bfloat16,half}.o "$work"/calls*.o ${LIBS:-}
}
export -f link
link "$work/tests" $objects
"$work/tests" > "$work/log" || { cat "$work/log"; exit 1; }

for entry in $all; do
  header=${entry%:*}
  awk -f "$here/mutants.awk" "include/momentum_delta/$header.hpp" |
    awk -v OFS='\t' -v header="$header" -v units="${entry#*:}" -v wanted=" $* " '
      wanted ~ /^ *$/ || index(wanted, " " header " ") || index(wanted, " " header ":" $1 " ") { print header, units, $0 }'
done > "$work/mutants"
echo "$(wc -l < "$work/mutants") mutants"

mutant() { # number
  local header units line what text dir=$work/$1 new=() rest=$objects
  IFS=$'\t' read -r header units line what text < <(sed -n "$1p" "$work/mutants") || true
  mkdir -p "$dir/momentum_delta/$(dirname "$header")"
  awk -v line="$line" -v text="${text//\\/\\\\}" 'NR == line { print text; next } { print }' \
    "$root/include/momentum_delta/$header.hpp" > "$dir/momentum_delta/$header.hpp"
  local result=killed unit defines=()
  for unit in ${units//+/ }; do
    if [[ $unit == [A-Z]* ]]; then defines+=("-D$unit"); continue; fi
    rest=${rest/$(object "$unit")/}
    new+=("$dir/${unit//\//_}.o")
    $compile -I "$dir" -I "$root/include" -c "$root/tests/$unit.test.cpp" -o "${new[-1]}" || result=stillborn
  done
  if ((${#defines[@]} > 0)); then
    new+=("$dir/kernels.o")
    $compile "${defines[@]}" -I "$dir" -I "$root/include" -c "$here/kernels.cpp" -o "${new[-1]}" || result=stillborn
  fi
  if [[ $result != stillborn ]]; then
    if ! link "$dir/tests" "${new[@]}" $rest; then
      result=stillborn
    elif timeout 120 "$dir/tests" --abort > /dev/null; then
      result=survived
    fi
  fi
  rm -rf "$dir"
  printf '%s\t%s\t%s\t%s\t%s\n' "$result" "$header" "$line" "$what" "$(sed "${line}!d; s/^ *//" "$root/include/momentum_delta/$header.hpp")"
}
export -f mutant
seq "$(wc -l < "$work/mutants")" | xargs -P "$jobs" -n 1 bash -c 'mutant "$1"' - 2> /dev/null | tee "${RESULTS:-/dev/null}" > "$work/results"

# survivors.txt: header, what, the line as it is, and why no test can see it, apart by tabs
awk -F'\t' -v reasons="$here/survivors.txt" '
  BEGIN { while ((getline line < reasons) > 0) { split(line, f, "\t"); known[f[1] FS f[2] FS f[3]] = 1 } }
  { count[$1]++ }
  $1 == "survived" { if (($2 FS $4 FS $5) in known) explained++; else print "survived: " $2 ".hpp:" $3 ": " $4 ": " $5 }
  END {
    n = count["killed"] + count["survived"]
    printf "%d killed of %d (%.1f %%), %d survived with a reason, %d without; %d did not compile\n", count["killed"], n,
      100 * count["killed"] / n, explained, count["survived"] - explained, count["stillborn"]
    exit count["survived"] > explained
  }' "$work/results"
