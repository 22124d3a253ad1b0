#!/bin/sh
# One source or several? MRPC with 400 examples on MPNet-base; the rows of one_source.csv. DATA as in results/README.md.
# It can be stopped; the same command goes on. The first loop chooses a learning rate of each kind, on a draw of its own, seed 5:
# of 1.5e-4, 5e-4 and 1.5e-3, U has 74.7, 78.0 and 76.0, all of mnli 74.7, 76.7 and 76.3, the fusion of it 79.0, 78.7 and 70.3, whose
# rate all fusions have. The last 1,000 training examples are held out, each seed draws 400 of the others, and 300 development
# examples choose the epoch. Sources: one epoch, 9,832 examples (qqp, sst2 4,000, scitail 2,674), 76.4, 77.4, 91.6 and 83.2 %.
# Permuted: the entries of each tensor of the other three in random order. In seed 3 both fusions of four stay at the most frequent
# label, 69.7. All runs: two hours on one core of an AMD EPYC, bf16, plus scoring.
set -e
MPNET=${MPNET:-sentence-transformers/all-mpnet-base-v2}
out=runs/one_source
how="--model $MPNET --import examples.mpnet results.one_source --max-length 128 --batch-size 16 --dtype bfloat16 --resume"
adapter_of() { # TASK EXAMPLES
  python train.py --stage adapter --task $1 --data-dir DATA $how --epochs 1 --lr 3e-4 --limit-train $2 --limit-dev 500 --out $out/$1
}
run() { # NAME SEED RATE EPOCHS STAGE ADAPTERS
  name=$1 seed=$2 lr=$3 epochs=$4 stage=$5; shift 5
  python train.py --stage $stage --task mrpc --adapters "$@" --data-dir $out/data $how --limit-train 400 \
    --seed $seed --lr $lr --epochs $epochs --patience 3 --out $out/$name-$seed
}
mnli=$out/mnli others="$out/qqp $out/sst2 $out/scitail" permuted="$out/permuted-qqp $out/permuted-sst2 $out/permuted-scitail"
test -d $out/held_out || python -m results.one_source split DATA
adapter_of mnli 10000; adapter_of qqp 4000; adapter_of sst2 4000; adapter_of scitail 4000
for task in qqp sst2 scitail; do
  test -f $out/permuted-$task/adapter.safetensors || python -m results.one_source permute $out/$task $out/permuted-$task
done
for lr in 1.5e-4 5e-4 1.5e-3; do for stage in up further fusion; do run rate-$stage-$lr 5 $lr 3 $stage $mnli; done; done
for stage in up further fusion; do eval "$stage=$(python -m results.one_source rate $out/rate-$stage-*-5)"; done
for seed in 0 1 2 3 4; do
  run head $seed 1e-3 6 head $mnli
  run up $seed $up 3 up $mnli
  run further $seed $further 3 further $mnli
  run fusion_of_one $seed $fusion 3 fusion $mnli
  run fusion_of_four $seed $fusion 3 fusion $mnli $others
  run fusion_with_permuted $seed $fusion 3 fusion $mnli $permuted
  python -m results.one_source rows $out/*-[0-$seed]
done
