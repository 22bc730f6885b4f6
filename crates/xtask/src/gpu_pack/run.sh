#!/usr/bin/env bash
# Runs what `cargo xtask gpu-pack` built, on a machine with an NVIDIA GPU and without Rust.
#
#   ./run.sh [tests [FILTER..]]   the suite on CUDA, a process per test; ends with "N passed, N failed, N unknown"
#   ./run.sh PROGRAM [options]    a benchmark or an example: what is in bin/
#
# CUDA_PATH is the toolkit, which CubeCL takes NVRTC and its headers from; /usr/local/cuda if unset.
# JOBS tests run at once, one per core if unset, each for SECONDS_EACH seconds at most, 180 if unset. What is
# compiled is kept in cache/ and shared by all processes. LOGS keeps each test's output, and times.tsv.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$CUDA_PATH/lib64:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# The driver drops the oldest kernels beyond this; the suite's do not fit its default.
export CUDA_CACHE_MAXSIZE="${CUDA_CACHE_MAXSIZE:-4294967296}"

program="${1:-tests}"
if [ ! -x "$here/bin/$program" ]; then
    usage
    echo "programs: $(cd "$here/bin" && echo *)"
    exit 2
fi
[ "$#" -eq 0 ] || shift
if ! ls "$CUDA_PATH"/lib64/libnvrtc.so* >/dev/null 2>&1; then
    echo "no CUDA toolkit in $CUDA_PATH: set CUDA_PATH" >&2
    exit 2
fi

if [ "$program" != tests ]; then
    exec "$here/bin/$program" "$@"
fi

# CubeCL looks for its configuration from the working directory upwards.
cd "$here" || exit 2
printf '[compilation]\ncache = true\n\n[environment]\npath = { directory = "%s/cache" }\n' "$here" >cubecl.toml

echo "commit $(cat COMMIT), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
logs="${LOGS:-$(mktemp -d)}"
mkdir -p "$logs"
bin/tests --list --format terse "$@" | sed -n 's/: test$//p' >"$logs/all" || exit 2
start="$(date +%s)"

one() {
    local name="$1" begin status result
    begin="$(date +%s.%N)"
    timeout "${SECONDS_EACH:-180}" bin/tests --exact "$name" --test-threads 1 >"$logs/${name//::/.}.log" 2>&1
    status=$?
    # A test that was cut off, or whose process ended in another way, has shown nothing.
    case "$status" in 0) result=passed ;; 101) result=failed ;; *) result=unknown ;; esac
    printf '%s\t%.1f\t%s\t%s\n' "$result" "$(echo "$(date +%s.%N) $begin" | awk '{ print $1 - $2 }')" "$status" "$name" >>"$logs/times.tsv"
    if [ "$result" != passed ]; then
        echo "$result (status $status): $name"
        grep -v '^$' "$logs/${name//::/.}.log" | tail -n 12 | cut -c 1-300
    fi
}
export -f one
export logs
: >"$logs/times.tsv"
xargs -a "$logs/all" -P "${JOBS:-$(nproc)}" -I '{}' bash -c 'one "$1"' _ '{}'

count() { grep -c "^$1" "$logs/times.tsv"; }
grep -h '^skipped: ' "$logs"/*.log 2>/dev/null | sort | uniq -c
echo "slowest:"
sort -t"$(printf '\t')" -k2,2 -rn "$logs/times.tsv" | head -n 8
echo "$(wc -l <"$logs/all") tests in $(($(date +%s) - start)) s, ${JOBS:-$(nproc)} at once"
echo "$(count passed) passed, $(count failed) failed, $(count unknown) unknown"
[ "$(count passed)" -eq "$(wc -l <"$logs/all")" ]
