#!/usr/bin/env bash
# Runs the mutants that `cargo xtask mutants --cuda` built, on a machine with an NVIDIA GPU and without Rust. This
# directory lies in that of the unpacked archive of `cargo xtask gpu-pack`, whose libraries it needs.
#
#   ./run-mutants.sh [-j JOBS] [-t SECONDS] [NAMES..]   16 at a time, 300 seconds each, if nothing is said
#
# First every filter of the list runs without a mutant, and must pass. Then a line a mutant: "NAME<TAB>killed by TEST",
# "NAME<TAB>killed by the time limit" or "NAME<TAB>SURVIVED"; the status is that of the worst. The logs are kept in
# logs/. CUDA_PATH is the toolkit, /usr/local/cuda if unset.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$CUDA_PATH/lib64:$here/../lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
jobs=16
export limit=300
while getopts "j:t:" option; do
    case "$option" in
        j) jobs="$OPTARG" ;;
        t) limit="$OPTARG" ;;
        *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
# CubeCL looks for its configuration, which run.sh writes, from the working directory upwards.
cd "$here" || exit 2
export here logs="$here/logs"
mkdir -p "$logs"
wanted=" $* "

# One line of the list: a mutant, or "none", and the filters.
one() {
    local name="${1%%$'\t'*}" filters="${1#*$'\t'}" log status
    # The filters' checksum keeps the logs of a mutant's lines apart.
    log="$logs/$name-$(cksum <<<"$filters" | cut -d' ' -f1).log"
    local mutant=("FLASH_DMA_MUTANT=$name")
    [ "$name" != none ] || mutant=(-u FLASH_DMA_MUTANT)
    # Compiled kernels are cached by a name that does not know of mutants: each has an environment of its own.
    # shellcheck disable=SC2086
    env "${mutant[@]}" CUBECL_ENVIRONMENT="mutant-$name" timeout "$limit" "$here/tests" $filters >"$log" 2>&1
    status=$?
    if grep -q '^running 0 tests' "$log"; then
        printf '%s\tNO TEST MATCHES %s\n' "$name" "$filters"
    elif [ "$status" -eq 0 ]; then
        printf '%s\tSURVIVED\n' "$name"
    elif [ "$status" -eq 124 ]; then
        printf '%s\tkilled by the time limit\n' "$name"
    else
        local failed
        failed="$(sed -n 's/.*test \(.*\) \.\.\. FAILED$/\1/p' "$log" | head -n 1)"
        printf '%s\tkilled by %s\n' "$name" "${failed:-a crash (status $status)}"
    fi
}
export -f one

list="$(while IFS=$'\t' read -r name filters; do
    if [ "$wanted" = "  " ] || [[ "$wanted" == *" $name "* ]]; then
        printf '%s\t%s\n' "$name" "$filters"
    fi
done <"$here/mutants.tsv")"
parallel() { tr '\n' '\0' | xargs -0 -P "$jobs" -I '{}' bash -c 'one "$1"' _ '{}'; }

echo "without a mutant:"
without="$(cut -f2 <<<"$list" | sort -u | sed 's/^/none\t/' | parallel)"
# Nothing to notice: all of them must "survive".
if grep -v $'^none\tSURVIVED$' <<<"$without"; then
    echo "tests fail without a mutant: see $logs" >&2
    exit 1
fi
echo "all pass"
results="$(printf '%s\n' "$list" | parallel | sort)"
# A mutant with several lines is killed if one of them is.
killed="$(grep $'\tkilled' <<<"$results" | sort -u -k1,1)"
[ -z "$killed" ] || printf '%s\n' "$killed"
survived="$(cut -f1 <<<"$list" | sort -u | comm -23 - <(cut -f1 <<<"$killed" | sort -u))"
[ -z "$survived" ] || sed 's/$/\tSURVIVED/' <<<"$survived"
echo "$(grep -c . <<<"$killed") killed, $(grep -c . <<<"$survived") survived"
[ -z "$survived" ]
