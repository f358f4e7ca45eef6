#!/bin/sh
# The measurements of the README and of results/ on an H200, in the order to run them in on one machine: each step re-measures
# Inductor as its anchor, and adds its rows to the results. Needs the package installed, and a GPU to itself.
#
#   bench_e2e/h200.sh kernels [CACHE]   find, verify and time the kernels at batch 1 and 4 (about 4 minutes)
#   bench_e2e/h200.sh whole [CACHE]     64 layers: eager, Inductor, the default policy
#   bench_e2e/h200.sh ladder [CACHE]    16 layers: every row
#   bench_e2e/h200.sh tests             what only a GPU can show
set -eu
cd "$(dirname "$0")/.."
step=${1:?kernels, whole, ladder or tests}
cache=${2:-.h200/cache}
results=bench_e2e/results/h200-qwen3_8.json
model="--model qwen3_8 --size full --batch 1 --batch 4 --context 128 --capacity 1280 --device cuda"
case $step in
  kernels) python3 -m jasperk_inductor.cli optimize $model --layers 4 --budget 60 --save-tuned --cache-dir "$cache" ;;
  whole) python3 -m jasperk_inductor.cli bench $model --rows eager,inductor,+I,jasperk --cache "$cache" --results $results --out .h200/whole ;;
  ladder) python3 -m jasperk_inductor.cli bench $model --layers 16 --cache "$cache" --results $results --out .h200/ladder ;;
  tests) python3 -m pytest -m gpu tests ;;
  *) echo "there is no step $step: kernels, whole, ladder or tests"; exit 2 ;;
esac
