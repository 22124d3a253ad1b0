#!/bin/sh
# Own adapter, full fine-tuning, head on the closest source and fusions on CB and RTE with equally many steps, three learning
# rates each, five folds, MiniLM; the rows of equal_budgets.csv. DATA as in results/README.md. The same command goes on.
set -e
out=runs/equal_budgets
how="--model minilm --max-length 128 --batch-size 16 --dtype bfloat16 --resume"
test -d $out/data || python -m results.equal_budgets folds DATA
for task in mnli qqp sst2 scitail; do
  python train.py --stage adapter --task $task --data-dir DATA $how --epochs 3 --lr 5e-4 --limit-train 10000 --limit-dev 500 --out $out/$task
done
sources="$out/mnli $out/qqp $out/sst2 $out/scitail"
run() { # SYSTEM STAGE "RATES" [--adapters ...]; no early stopping, the best epoch is kept
  system=$1 stage=$2 rates=$3; shift 3
  for lr in $rates; do
    python train.py --stage $stage --task $task --data-dir $out/data/$fold $how "$@" --lr $lr --epochs $epochs --patience $epochs \
      --out $out/$task-$fold/$system-$lr
  done
}
for fold in 0 1 2 3 4; do for task in cb rte; do
  case $task in cb) epochs=15 ;; rte) epochs=5 ;; esac # 12 and 38 steps each
  run own adapter "3e-4 1e-3 3e-3"
  run full full "2e-5 6e-5 2e-4"
  run head head "5e-4 2e-3 8e-3" --adapters $out/mnli
  run fusion fusion "5e-5 2.5e-4 1e-3" --adapters $sources
  own=$(python -m results.equal_budgets best $out/$task-$fold/own-*)
  run with_own fusion "5e-5 2.5e-4 1e-3" --adapters $sources $own
done; done
python -m results.equal_budgets rows $out/*-[0-4]/*-*
