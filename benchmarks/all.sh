#!/usr/bin/env bash
# Every row of docs/benchmarks.md, one line of JSON each: benchmarks/all.sh FILE.jsonl [ROUNDS]
# A benchmark that fails leaves no line; the others still run, and the exit code says that one failed.
set -uo pipefail
cd "$(dirname "$0")/.."

file=${1:?where the results go}
rounds=${2:-5}
failed=0

bench() {
  echo "== rollyard bench $*" >&2
  .venv/bin/rollyard bench "$@" --rounds "$rounds" --json >>"$file" || failed=1
}

mkdir -p "$(dirname "$file")"
for dtype in float32 bfloat16; do
  for workload in 64x1 8x8 one ragged; do
    for peer in hf vllm; do
      bench engine --workload "$workload" --peer "$peer" --dtype "$dtype"
    done
  done
  for workload in static prefix queue decode; do
    bench engine --workload "$workload" --dtype "$dtype"
  done
  for workload in 8x8 ragged; do
    bench train --workload "$workload" --dtype "$dtype"
  done
  for workload in fixed natural; do
    bench step --workload "$workload" --dtype "$dtype"
  done
  for workload in idle delta relay adapter; do
    bench sync --workload "$workload" --dtype "$dtype"
  done
done
echo "== rollyard bench placements" >&2 # runs each placement once
.venv/bin/rollyard bench placements --json >>"$file" || failed=1
echo "== rollyard bench tails" >&2 # on a virtual clock
.venv/bin/rollyard bench tails --json >>"$file" || failed=1
for workload in speed journal areal soak; do
  echo "== rollyard bench load --workload $workload" >&2
  .venv/bin/rollyard bench load --workload "$workload" --rounds "$rounds" --json >>"$file" || failed=1
done
exit "$failed"
