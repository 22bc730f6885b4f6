#!/usr/bin/env bash
# Runs what `cargo xtask gpu-pack` built, on a machine with an NVIDIA GPU and without Rust.
#
#   ./run.sh [tests [FILTER..]]   the suite on CUDA, and the models'; ends with "N passed, N failed, N unknown"
#   ./run.sh step [options]       training steps by `bench step`, and PyTorch's by train_peer.py; the options go to both
#   ./run.sh generation [options] tokens by `bench generation`, and PyTorch's by generate_peer.py; the options go to both
#   ./run.sh PROGRAM [options]    a benchmark or an example: what is in bin/
#
# CUDA_PATH is the toolkit, which CubeCL takes NVRTC and its headers from; /usr/local/cuda if unset.
# JOBS processes run at once, on all GPUs in turn: five to four cores if unset, as a process waits for its context first.
# Each runs tests on one engine that took up to 40 seconds in all, at most TESTS_EACH, 16 if unset. SECONDS_EACH
# is the longest time of a test, 180 if unset. What is compiled is kept in cache/ and shared by all processes. LOGS
# keeps what the processes print, times.tsv, and compiled.tsv with the kernels that each process compiled. TIMES is the
# times.tsv of an earlier run, $here/times.tsv if unset: the longest come first then. Of steps and of generation, CASES are "tokens:sequences:window ..", where
# the tokens of generation are those of a prompt, ROWS is the file for the rows, PYTHON the interpreter that has PyTorch
# (none: "PYTHON= ./run.sh step").
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage() { sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$CUDA_PATH/lib64:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# The driver drops the oldest kernels beyond this; the suite's do not fit its default.
export CUDA_CACHE_MAXSIZE="${CUDA_CACHE_MAXSIZE:-4294967296}"

program="${1:-tests}"
binary="$program"
case "$program" in step | generation) binary=bench ;; esac
if [ ! -x "$here/bin/$binary" ]; then
    usage
    echo "programs: $(cd "$here/bin" && echo *)"
    exit 2
fi
[ "$#" -eq 0 ] || shift
if ! ls "$CUDA_PATH"/lib64/libnvrtc.so* >/dev/null 2>&1; then
    echo "no CUDA toolkit in $CUDA_PATH: set CUDA_PATH" >&2
    exit 2
fi

# Calls a function with the tokens, the sequences and the window of each case. One configuration a process, ours and
# PyTorch's in turn, so that a device that grows slow grows so for both. What does not fit into the memory fails alone.
# Without a cache the first step of a process compiles: remove cache/ to time that.
cases() {
    local case="$1" shapes="$2" shape seq batch window
    shift 2
    rows="$(realpath -m "${ROWS:-$here/$program.jsonl}")"
    python="${PYTHON-python3}"
    failed=0
    cd "$here" || return 2
    configure
    for shape in ${CASES:-$shapes}; do
        IFS=: read -r seq batch window <<<"$shape"
        "$case" "$seq" "$batch" "$window" "$@"
    done
    echo "rows: $rows, $failed failed"
    [ "$failed" -eq 0 ]
}

try() { "$@" || { echo "failed: $*" && failed=$((failed + 1)); }; }

step() {
    local window="$3" sizes=(--seq "$1" --batch "$2" --json "$rows" "${@:4}")
    try bin/bench step "${sizes[@]}" --window "$window"
    try bin/bench step "${sizes[@]}"
    [ -n "$python" ] || return 0
    try "$python" train_peer.py "${sizes[@]}" --compile
    try "$python" train_peer.py "${sizes[@]}" --compile --window "$window"
}

generation() {
    local window="$3" sizes=(--prompt "$1" --batch "$2" --json "$rows" "${@:4}")
    try bin/bench generation "${sizes[@]}" --window "$window"
    [ -n "$python" ] || return 0
    try "$python" generate_peer.py "${sizes[@]}" --mode graph
    try "$python" generate_peer.py "${sizes[@]}"
}

# CubeCL looks for its configuration from the working directory upwards. Its records of each compilation would be
# written beside the kernels, under the lock that all processes share. Compilations are logged if a file is named.
configure() {
    printf '[compilation]\ncache = true\n' >cubecl.toml
    [ "$#" -eq 0 ] || printf 'logger = { level = "basic", file = "%s" }\n' "$1" >>cubecl.toml
    cat >>cubecl.toml <<TOML

[environment]
path = { directory = "$here/cache" }
records = { level = "off" }
TOML
}

case "$program" in
    tests) ;;
    step)
        cases step "4096:8:1024 8192:4:1024 32768:1:2048 131072:1:2048" "$@"
        exit
        ;;
    generation)
        cases generation "8192:1:1024 32768:1:2048 32768:8:2048" "$@"
        exit
        ;;
    *) exec "$here/bin/$program" "$@" ;;
esac

logs="${LOGS:-$(mktemp -d)}"
mkdir -p "$logs"
logs="$(realpath "$logs")"
cd "$here" || exit 2
configure
times="${TIMES:-$here/times.tsv}"
[ ! -f "$times" ] || times="$(realpath "$times")"

echo "commit $(cat COMMIT), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
list() { "$1" --list --format terse "${@:2}" | sed -n 's/: test$//p'; }
# The CPU engine's tests say nothing of a GPU.
list bin/tests "$@" | grep -v '::cpu$' >"$logs/all"
[ "${PIPESTATUS[0]}" -eq 0 ] || exit 2
# Those of the models are called so.
[ ! -x bin/models ] || list bin/models "$@" | sed 's/^/models::/' >>"$logs/all"
: >"$logs/times.tsv"
: >"$logs/compiled.tsv"
start="$(date +%s)"

# A line a process: a process waits seconds for its context beside others, so it runs several tests on one engine, short
# ones next to those of the same file, with which they share most of their kernels. First come the engines whose kernels
# another one runs as well, so that it finds them compiled: `mma` takes the portable ones for what it does not serve, the own choice those of all, and Burn the same; but
# a process of Burn that takes long does not wait for the last ones, or it would end alone. The longest come first, so that
# the last processes end together; a test that nobody timed counts as one of half a minute. A test of faults or of
# memory is alone in its process. Models have no engine in their names.
units() {
    local before=/dev/null tab
    [ ! -f "$times" ] || before="$times"
    tab="$(printf '\t')"
    awk -F:: -v OFS='\t' -v before="$before" -v most="$UNIT_SECONDS" 'BEGIN {
        while ((getline line <before) > 0) { split(line, of, "\t"); took[of[3]] = of[2] }
    }
    {
        stage = $NF ~ /portable$/ ? 1 : $NF ~ /mma$/ ? 2 : $NF ~ /^burn/ ? 4 : 3
        alone = $1 == "faults" || $1 == "memory"
        seconds = $0 in took ? took[$0] : 30
        unit = alone ? $0 : $1 == "models" ? $1 "::" $2 "::" $3 : $NF (seconds < most / 2 ? " short" : "")
        print stage, unit, $1 "::" $2, seconds, $0
    }' |
        sort -s -t "$tab" -k1,3 -k4,4rn | cut -f 1,2,4,5 | awk -F'\t' -v OFS='\t' -v each="${TESTS_EACH:-16}" -v most="$UNIT_SECONDS" '
        function finish() {
            if (tests) print (stage == 4 && seconds >= most ? 3 : stage), seconds, line
            line = ""; tests = seconds = 0
        }
        $2 != unit || tests == each || seconds + $3 > most { finish(); stage = $1; unit = $2 }
        { line = line (tests ? " " : "") $4; tests++; seconds += $3 }
        END { finish() }' |
        sort -s -t "$tab" -k1,1 -k2,2rn | cut -f 3
}

# Runs tests in one process. Those of which it says nothing, as it was ended before, run again, alone. Models are compared
# with numbers of f32, so their products are not TF32.
unit() {
    local log="$logs/${1//::/.}.log" begin="$EPOCHREALTIME" now line name tenths rest=() of=""
    local program=("$here/bin/tests") at="$logs/${1//::/.}.at"
    case "$1" in models::*) of=models:: program=(env FLASH_DMA_ENGINE=portable "$here/bin/models") ;; esac
    # In a directory of its own, so that its compilations are counted by themselves.
    mkdir -p "$at" && cd "$at" && configure "$at/compiled" || return
    export CUDA_VISIBLE_DEVICES="${devices[$((SLOT % ${#devices[@]}))]}"
    timeout "$((${SECONDS_EACH:-180} * $#))" "${program[@]}" --exact "${@#"$of"}" --include-ignored --test-threads 1 2>"${log%.log}.err" |
        while IFS= read -r line; do
            printf '%s\n' "$line" >>"$log"
            case "$line" in
                "test "*" ... ok") result=passed ;;
                "test "*" ... FAILED") result=failed ;;
                *) continue ;;
            esac
            now="$EPOCHREALTIME" name="$of${line#test }"
            tenths=$(((${now/./} - ${begin/./}) / 100000))
            printf '%s\t%d.%d\t%s\n' "$result" $((tenths / 10)) $((tenths % 10)) "${name% ... *}" >>"$logs/times.tsv"
            begin="$now"
        done
    printf '%d\t%s\n' "$(grep -c 'Compiling kernel' compiled 2>/dev/null)" "$*" >>"$logs/compiled.tsv"
    for name in "$@"; do
        if grep -qxF "test ${name#"$of"} ... FAILED" "$log"; then
            echo "failed: $name"
            awk -v begin="---- ${name#"$of"} stdout ----" '$0 == begin { on = 1; next } /^----|^failures:/ { on = 0 } on && NF' "$log" |
                head -n 12 | cut -c 1-300
        elif ! grep -qxF "test ${name#"$of"} ... ok" "$log"; then
            rest+=("$name")
        fi
    done
    if [ "$#" -gt 1 ]; then
        for name in "${rest[@]}"; do unit "$name"; done
    elif [ "${#rest[@]}" -eq 1 ]; then
        # A test that was cut off, or whose process ended in another way, has shown nothing.
        printf 'unknown\t%d\t%s\n' $(((${EPOCHREALTIME/./} - ${begin/./}) / 1000000)) "$1" >>"$logs/times.tsv"
        echo "unknown: $1"
        tail -n 12 "${log%.log}.err" | cut -c 1-300
    fi
}
export -f unit configure
export logs here
# Seconds that the tests of a process may have taken in all.
UNIT_SECONDS=40
# Problems with tensors past 2^31 elements fill much of a GPU's memory, one at a time on each GPU: beside the others where it has
# room for both, else after them.
large="^memory::large::"
grep -v "$large" "$logs/all" | units >"$logs/units"
grep "$large" "$logs/all" | units >"$logs/units-large"
# Arrays are not exported.
all_devices="${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
export all_devices
jobs="${JOBS:-$(($(nproc) * 5 / 4))}"
IFS=, read -ra devices <<<"${all_devices:-0}"
# Runs the units of a file in so many processes at once.
run_units() {
    # shellcheck disable=SC2016
    xargs -a "$1" -P "$2" --process-slot-var=SLOT -I '{}' bash -c '
        IFS=, read -ra devices <<<"${all_devices:-0}"
        read -ra names <<<"$1"
        unit "${names[@]}"' _ '{}'
}
least="$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sort -n | head -n 1)"
if [ "${least:-0}" -ge 120000 ]; then
    run_units "$logs/units-large" "${#devices[@]}" &
    run_units "$logs/units" "$jobs"
    wait
else
    run_units "$logs/units" "$jobs"
    run_units "$logs/units-large" "${#devices[@]}"
fi

count() { grep -c "^$1" "$logs/times.tsv"; }
grep -h '^skipped: ' "$logs"/*.err 2>/dev/null | sort | uniq -c
echo "slowest:"
sort -t"$(printf '\t')" -k2,2 -rn "$logs/times.tsv" | head -n 8
echo "most kernels:"
sort -rn "$logs/compiled.tsv" | head -n 12 | cut -c 1-200
compiled="$(awk '{ sum += $1 } END { print sum + 0 }' "$logs/compiled.tsv")"
echo "$(wc -l <"$logs/all") tests in $(($(date +%s) - start)) s, $jobs processes at once, $compiled kernels compiled"
echo "$(count passed) passed, $(count failed) failed, $(count unknown) unknown"
[ "$(count passed)" -eq "$(wc -l <"$logs/all")" ]
