#!/usr/bin/env bash
# Draws bench/figures/*.svg and prints the table of README.md, from a run of the benchmark or from saved medians.
#
#   bench/figures.sh [BENCHMARK [FOLDER]]  default: build/release/bench/momentum_delta_bench bench/figures
#   bench/figures.sh --data medians.csv    from an earlier run
#
# A run leaves its medians in FOLDER/medians.csv, beside the figures. Needs gnuplot.
set -euo pipefail
export LC_ALL=C
bench=$(cd "$(dirname "$0")" && pwd)
out=$bench/figures

case ${1-} in
  -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
  --data) data=${2:?--data needs a file}; [ $# -eq 2 ] ;;
  -*) echo "$0: unknown option $1" >&2; exit 2 ;;
  *) program=${1-$bench/../build/release/bench/momentum_delta_bench}; out=${2-$out}; data= ;;
esac
command -v gnuplot > /dev/null || { echo "$0: gnuplot is missing" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

# The medians of Google Benchmark's JSON, one key a line there, as CSV; what it says of the machine as comments.
medians() {
  awk '
    function value(line) { sub(/^[^:]*": /, "", line); sub(/,$/, "", line); gsub(/"/, "", line); return line }
    /^  "benchmarks"/ { 
      print "name,wall_us,ns_per_token_head,peak_fraction,bandwidth_fraction,update_fraction"
      fflush()
    }
    /^    "(date|num_cpus|Eigen_SIMD|compiler|peak_|copy_|update_|large_)/ {
      key = $1; gsub(/[":]/, "", key); print "# " key ": " value($0)
    }
    /^    \{/ { delete x }
    /^      "/ { key = $1; gsub(/[":]/, "", key); x[key] = value($0) }
    /^    \}/ && x["aggregate_name"] == "median" {
      print x["run_name"] "," x["real_time"] "," x["ns_per_token_head"] "," x["peak_fraction"] "," \
            x["bandwidth_fraction"] "," x["update_fraction"] | "sort -V"
    }' "$1"
}

if [ -z "$data" ]; then
  [ -x "$program" ] || { echo "$0: $program is not built" >&2; exit 2; }
  shapes='K:(64/V:64|128/V:128|128/V:256|256/V:512)/T:2048'
  filter="^(forward|training)/automatic/(float|bfloat16)/$shapes/threads:"
  filter+="|^forward/chunk/float/$shapes/threads:1\$"
  filter+='|^forward/(recurrent|chunk)/float/K:128/V:256/T:[0-9]+/threads:1$'
  filter+='|^step/float/'
  "$program" --benchmark_filter="$filter" --benchmark_min_time=0.1 --benchmark_repetitions=5 \
    --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true \
    --benchmark_out="$work/run.json" --benchmark_out_format=json >&2
  data=$out/medians.csv
  medians "$work/run.json" > "$data"
fi

# Column NAME of the benchmark RUN, or nothing: value RUN NAME
value() {
  awk -F, -v run="$1" -v name="$2" '
    $1 == "name" { for (i = 2; i <= NF; ++i) if ($i == name) column = i }
    $1 == run { print $column }' "$data"
}
# The quotient of two values, or nothing.
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (a != "" && b != "" && b != 0) printf "%.4g\n", a / b }'; }
# The numbers of a name's component: numbers threads '^forward/..'
numbers() {
  awk -F, -v key="/$1:" -v runs="$2" '
    $1 ~ runs { s = $1; sub(".*" key, "", s); sub("/.*", "", s); print s }' "$data" | sort -nu
}

shapes=(K:64/V:64 K:128/V:128 K:128/V:256 K:256/V:512)
title() { local s=${1//[KV:]/}; echo "${s/\// × }"; }
mapfile -t all_threads < <(numbers threads '^forward/automatic/float/K:128/V:256/T:2048/')
all=${all_threads[-1]}

# Figures.

for t in $(numbers T '^forward/(recurrent|chunk)/float/K:128/V:256/T:[0-9]+/threads:1$'); do
  run=float/K:128/V:256/T:$t/threads:1
  echo "$t $(value "forward/recurrent/$run" ns_per_token_head) $(value "forward/chunk/$run" ns_per_token_head)"
done > "$work/time"

for shape in "${shapes[@]}"; do
  printf '"%s"' "$(title "$shape")"
  for pass in forward/automatic forward/chunk training/automatic; do
    fraction=$(value "$pass/float/$shape/T:2048/threads:1" peak_fraction)
    printf ' %s' "$(ratio "$fraction" 0.01)"
  done
  echo
done > "$work/peak"

for n in "${all_threads[@]}"; do
  printf '%s' "$n"
  for pass in forward training; do
    run=$pass/automatic/float/K:128/V:256/T:2048/threads
    printf ' %s' "$(ratio "$(value "$run:1" wall_us)" "$(value "$run:$n" wall_us)")"
  done
  echo
done > "$work/threads"

gnuplot << GNUPLOT
set terminal svg size 720,420 font "Helvetica,Arial,sans-serif,14" background rgb "white" linewidth 1.5
set border 3 lc rgb "#606060"
set tics nomirror textcolor rgb "#202020"
set grid ytics lc rgb "#d8d8d8" lt 1 lw 0.7
set style line 1 lc rgb "#1f6fb4" pt 7 ps 0.8 lw 1.6
set style line 2 lc rgb "#d9691e" pt 5 ps 0.8 lw 1.6
set style line 3 lc rgb "#3a8f4d" pt 9 ps 0.9 lw 1.6

set output "$out/time_per_token.svg"
set title "Forward pass of 128 × 256 heads in float, one thread"
set xlabel "tokens T"
set ylabel "time per token and head [µs]"
set logscale x 4
set xrange [181:92682]
set yrange [0:*]
set xtics (256, 1024, 4096, 16384, 65536)
set key bottom right
plot "$work/time" using 1:(\$2 / 1000) with linespoints ls 1 title "recurrent", \
     "" using 1:(\$3 / 1000) with linespoints ls 2 title "chunk"

set output "$out/peak_fraction.svg"
unset logscale
set title "Useful operations against the measured multiply-add peak of one core, float, T 2048"
set xlabel "K × V of a head"
set ylabel "fraction of peak [%]"
set xrange [-0.6:3.6]
set yrange [0:100<*]
set ytics 20
set xtics ("" 0) scale 0
set key above center horizontal samplen 2
set style data histograms
set style histogram clustered gap 1
set style fill solid 1 noborder
plot "$work/peak" using 2:xtic(1) ls 1 title "forward, automatic", "" using 3 ls 2 title "forward, chunk", \
     "" using 4 ls 3 title "training, automatic", \
     "" using (\$0 - 0.25):2:(sprintf("%.0f", \$2)) with labels offset 0,0.6 font ",12" notitle, \
     "" using (\$0):3:(sprintf("%.0f", \$3)) with labels offset 0,0.6 font ",12" notitle, \
     "" using (\$0 + 0.25):4:(sprintf("%.0f", \$4)) with labels offset 0,0.6 font ",12" notitle

set output "$out/threads.svg"
set title "Speedup by threads, 6 heads of 128 × 256 in float, T 2048"
set xlabel "threads"
set ylabel "speedup [times one thread]"
set xrange [0.8:$all + 0.2]
set yrange [0:$all + 0.2]
set xtics (${all_threads[0]}$(printf ', %s' "${all_threads[@]:1}")) scale 1
set ytics autofreq
set key inside top left vertical samplen 4
plot x with lines lc rgb "#909090" dt 2 title "linear", \
     "$work/threads" using 1:2 with linespoints ls 1 title "forward, automatic", \
     "" using 1:3 with linespoints ls 3 title "training, automatic"
GNUPLOT

# The table.

# row TITLE COMMAND: COMMAND SHAPE prints one cell's number.
row() {
  local title=$1 shape cell
  shift
  printf '| %s |' "$title"
  for shape in "${shapes[@]}"; do
    cell=$("$@" "$shape")
    [ -z "$cell" ] || cell=$(printf '%.2f' "$cell")
    printf ' %s |' "$cell"
  done
  echo
}
peak_cell() { value "$1/float/$2/T:2048/threads:1" peak_fraction; }
storage_cell() {
  ratio "$(value "$1/automatic/bfloat16/$2/T:2048/threads:1" ns_per_token_head)" \
    "$(value "$1/automatic/float/$2/T:2048/threads:1" ns_per_token_head)"
}
speedup_cell() {
  local run=$1/automatic/float/$2/T:2048/threads
  ratio "$(value "$run:1" wall_us)" "$(value "$run:$all" wall_us)"
}
step_cell() { value "step/float/$2/threads:1" "$1"; }

printf '| |'
for shape in "${shapes[@]}"; do printf ' %s |' "$(title "$shape")"; done
printf '\n| --- | --- | --- | --- | --- |\n'
row 'forward automatic, fraction of peak' peak_cell forward/automatic
row 'forward chunk, fraction of peak' peak_cell forward/chunk
row 'training, fraction of peak' peak_cell training/automatic
row 'forward automatic, time of bfloat16 / float' storage_cell forward
row 'training, time of bfloat16 / float' storage_cell training
if [ "$all" -gt 1 ]; then
  row "forward automatic, speedup by $all threads" speedup_cell forward
  row "training, speedup by $all threads" speedup_cell training
fi
row 'step, fraction of copy bandwidth' step_cell bandwidth_fraction
row 'step, fraction of update bandwidth' step_cell update_fraction
printf '\nMeasured with:\n\n'
sed -n 's/^# /- /p' "$data"
