#!/usr/bin/env bash
# Usage: tools/setup.sh VENV [EXTRA ...]
#
# Create the virtual environment VENV if it is missing, and install this checkout into it, editable,
# with the extras named. The Makefile calls this; a stamp file keeps it from running twice.
#
#   BASE_PYTHON  the interpreter to make VENV from (default: the first python3 >= 3.10 found)
#   TORCH        a pip requirement for torch, in place of the choice made here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1
shift
extras=("$@")
cpu_torch=torch==2.13.0

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${BASE_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  die "cute-attn needs Python 3.10 or later and found none (tried ${BASE_PYTHON:-python3, python3.10 to python3.13})." \
    "Install one, or name it with BASE_PYTHON=/path/to/python3."
}

create_venv() {
  local base
  base=$(find_python)
  if "$base" -c 'import venv, ensurepip' 2>/dev/null; then
    say "creating $venv with $("$base" --version)"
    "$base" -m venv "$venv"
  elif command -v uv >/dev/null; then
    say "creating $venv with uv and $("$base" --version)"
    uv venv --seed --python "$base" "$venv"
  else
    die "$base has no venv module. Install it (on Debian and Ubuntu: apt install python3-venv), or install uv."
  fi
}

has_driver() {
  nvidia-smi >/dev/null 2>&1 || [[ -e /dev/nvidia0 ]] ||
    PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep -q 'libcuda\.so'
}

# Major CUDA version that the driver supports; 0 when nvidia-smi does not say.
driver_cuda_major() {
  local major
  major=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1)
  printf '%s' "${major:-0}"
}

# uv knows where PyTorch's builds for each kind of machine are; pip only sees the default one.
uv_install_torch() {
  command -v uv >/dev/null || "$python" -m pip install -qq uv 2>/dev/null || return 1
  PATH=$PATH:$venv/bin uv pip install --quiet --python "$python" --torch-backend="$1" "$2"
}

install_torch() {
  if "$python" -c 'import sys, importlib.util as u; sys.exit(not u.find_spec("torch"))'; then
    return
  fi
  if [[ -n ${TORCH:-} ]]; then
    say "installing $TORCH"
    "${pip_install[@]}" "$TORCH"
  elif ! has_driver; then
    say "no NVIDIA driver here: installing a CPU build of torch"
    "${pip_install[@]}" "$cpu_torch+cpu" 2>/dev/null || uv_install_torch cpu "$cpu_torch" ||
      "${pip_install[@]}" "$cpu_torch"
  elif ((cuda_major >= 13)); then
    say "driver for CUDA $cuda_major: installing torch"
    "${pip_install[@]}" torch
  else
    say "driver for CUDA $cuda_major (0: unknown): installing a torch that fits it"
    uv_install_torch auto torch || "${pip_install[@]}" torch
  fi
}

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || create_venv
python=$venv/bin/python
pip_install=("$python" -m pip install -qq)
cuda_major=$(driver_cuda_major)

install_torch
if ((cuda_major >= 13)); then
  extras+=(cu13)
fi
joined=$(IFS=, && printf '%s' "${extras[*]}")
say "installing cute-attn${joined:+[$joined]}"
"${pip_install[@]}" --editable ".${joined:+[$joined]}"
