#!/usr/bin/env bash
# Everything that needs a GPU, what is cheap and can fail first.
#
# usage: tools/gpu.sh [checks] [tests] [bench] [parity]       the first three without arguments
#   checks    imports, versions, the ops' tests
#   tests     all other GPU tests
#   bench     scripts of tools/bench; BENCH holds names and arguments, with semicolons between several; COMMIT is
#             recorded where there is no git
#   parity    logits of full-size models against float32; SIZES holds which (default: qwen3-0.6b)
#
# Tests run in PROCESSES processes (default 6): most of their time is compiling. A quiet machine is for bench alone.
# Logs go to OUT (default: build/gpu). If a folder .whl exists, the wheels in it are installed into SITE (default:
# build/site) first and used; the Python that runs is PYTHON (default: python3). The checkout itself is what is tested.
# Failing checks end the script; failing tests do not keep it from measuring. vLLM takes part in bench if
# .carry/site.tar.xz is there, or if COMPILED_LLM_VLLM says how to run it. Pictures are drawn where matplotlib is:
# `compiled-llm bench show bench-1.json --plot bench.png`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=${OUT:-build/gpu}
site=${SITE:-build/site}
stages=("$@")
if ((${#stages[@]} == 0)); then
  stages=(checks tests bench)
fi
for stage in "${stages[@]}"; do
  case $stage in
  checks | tests | bench | parity) ;;
  *)
    echo "tools/gpu.sh: no stage $stage; there are checks, tests, bench and parity" >&2
    exit 2
    ;;
  esac
done

mkdir -p "$out"
export PYTHONPATH=$PWD:$PWD/ops${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if compgen -G '.whl/*.whl' >/dev/null; then
  mkdir -p "$site"
  site=$(cd "$site" && pwd)
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
  export PYTHONPATH=$site:$PYTHONPATH PATH=$site/bin:$PATH # FlashInfer calls ninja
fi

say() { printf '\n== %s, %(%H:%M:%S)T\n' "$1" -1; }

# run_tests LOG ARGUMENT...: GPU tests. pytest-timeout, which the project's options name, may be absent.
run_tests() {
  local log=$1 options=()
  shift
  "$python" -c 'import pytest_timeout' 2>/dev/null || options=(-o 'addopts=-ra --strict-markers')
  "$python" -c 'import xdist' 2>/dev/null && options+=(-n "${PROCESSES:-6}" --dist worksteal)
  # Each result as it comes, with its traceback: what a run that is cut off has found is not lost.
  "$python" -c 'import pytest_reportlog' 2>/dev/null && options+=(--report-log "$out/${log%.log}.jsonl")
  # One thread for references that are computed on the CPU, since several processes compute some at once.
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest "${options[@]}" -p no:cacheprovider -p no:logging -m "${MARKED:-gpu}" -v --durations=12 "$@" 2>&1 | tee "$out/$log"
}

checks() {
  say 'imports and versions'
  "$python" - 2>&1 <<'PYTHON' | tee "$out/versions.log"
import importlib
import shutil
import sys

missing = []
for name in ("torch", "transformers", "numpy", "rich", "pytest", "flashinfer", "compiled_llm", "compiled_llm_flashinfer", "compiled_llm_ops"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", ""), flush=True)
    except ImportError as error:
        missing.append(f"{name}: {error}")
for line in missing:
    print("missing:", line)
if missing:
    sys.exit(1)

import torch
from compiled_llm_ops.backends import backend_named

print("python", sys.version.split()[0], "CUDA", torch.version.cuda, "nvcc", shutil.which("nvcc"))
if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
if problems := backend_named("flashinfer").problems():
    sys.exit("\n".join(problems))
PYTHON
  say 'the ops'
  run_tests ops.log -x tests/ops/test_*_gpu.py
}

tests() {
  local files=() file
  for file in $(grep -rlE 'mark\.gpu' tests --include='test_*.py'); do
    # The checks have run these already.
    if [[ $file != tests/ops/test_*_gpu.py || " ${stages[*]} " != *' checks '* ]]; then
      files+=("$file")
    fi
  done
  say "${files[*]}"
  MARKED='gpu and not whole_device' run_tests model.log -rP "${files[@]}"
  MARKED='gpu and whole_device' PROCESSES=0 run_tests memory.log -rP "${files[@]}"
}

# vLLM in an environment of its own: its site would get in the way of ours, and ours of its.
prepare_vllm() {
  if [[ -n ${COMPILED_LLM_VLLM:-} || ! -e .carry/site.tar.xz ]]; then
    return
  fi
  local folder=/tmp/vllm_site
  if [[ ! -d $folder ]]; then
    mkdir -p "$folder"
    "$python" -W ignore -m tarfile -e .carry/site.tar.xz "$folder"
  fi
  # No downloads, no FlashInfer and no network there.
  export COMPILED_LLM_VLLM="env PYTHONPATH=$folder LD_LIBRARY_PATH=/usr/local/nvidia/lib64:${LD_LIBRARY_PATH:-} \
PEER_FORCE_CUDA=1 VLLM_PLUGINS= VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_DEEP_GEMM_WARMUP=skip \
DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_HOST_IP=127.0.0.1 \
GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo $python"
}

bench() {
  prepare_vllm
  local -a runs arguments
  local run number=0 status=0
  IFS=';' read -ra runs <<<"${BENCH:-latency --model qwen3-0.6b --decoding both}"
  for run in "${runs[@]}"; do
    read -ra arguments <<<"$run"
    number=$((number + 1))
    say "tools/bench: ${arguments[*]}"
    "$python" "tools/bench/${arguments[0]}.py" "${arguments[@]:1}" \
      ${COMMIT:+--commit "$COMMIT"} \
      --json "$out/bench-$number.json" | tee "$out/bench-$number.md" || status=$?
  done
  return "$status"
}

parity() {
  local size status=0
  for size in ${SIZES:-qwen3-0.6b}; do
    say "parity, $size"
    "$python" tools/parity.py "$size" | tee "$out/parity-$size.md" || status=$?
  done
  return "$status"
}

status=0
for stage in "${stages[@]}"; do
  if [[ $stage == checks ]]; then
    checks
  else
    "$stage" || status=$?
  fi
done
say "done with status $status"
exit "$status"
