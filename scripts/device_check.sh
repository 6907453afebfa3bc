#!/bin/sh
# The measurements of `make bench` on one NVIDIA GPU, within five minutes: bf16, fused attention, CUDA graphs.
#   scripts/device_check.sh [OUTPUT_FOLDER] [key=value ...]
# Writes device.json and device.md into the folder (default: $OUT, else runs/device). Keys: see scripts/device_check.py;
# device=cpu size=tiny tries the script itself on any machine. PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
"" | *=*) folder="${OUT:-runs/device}" ;;
*)
  folder="$1"
  shift
  ;;
esac
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || command -v "$python" >/dev/null || python=python3
exec "$python" -m scripts.device_check "folder=$folder" "$@"
