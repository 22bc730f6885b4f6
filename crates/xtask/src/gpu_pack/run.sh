#!/usr/bin/env bash
# Runs what `cargo xtask gpu-pack` built, on a machine with an NVIDIA GPU and without Rust.
#
#   ./run.sh [tests [libtest options]]   the contract tests on CUDA; ends with "N passed, N failed, N skipped"
#   ./run.sh PROGRAM [options]           a benchmark or an example: what is in bin/
#
# CUDA_PATH is the toolkit, which CubeCL takes NVRTC and its headers from; /usr/local/cuda if unset.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage() { sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$CUDA_PATH/lib64:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

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

echo "commit $(cat "$here/COMMIT"), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
"$here/bin/tests" "$@" 2>&1 | tee "$log"
status="${PIPESTATUS[0]}"
# libtest's own summary; a crash leaves none, and then the tests that ended are counted.
if ! sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored.*/\1 passed, \2 failed, \3 skipped/p' "$log" | grep .; then
    passed="$(grep -c '^test .* \.\.\. ok$' "$log")"
    failed="$(grep -c '^test .* \.\.\. FAILED$' "$log")"
    echo "$passed passed, $failed failed, then the run ended early (status $status)"
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
