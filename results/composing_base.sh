#!/bin/sh
# Ways to compose on RTE and MRPC, 400 examples, MPNet-base; the rows of composing_base.csv. The last 1,000 training examples
# are held out, rates are chosen with seed 5. The sources are those of one_source.csv; DATA as in results/README.md. Goes on.
set -e
MPNET=${MPNET:-sentence-transformers/all-mpnet-base-v2}
out=runs/composing_base
for task in mrpc rte; do
  mkdir -p $out/data/$task $out/held_out/$task
  test -f $out/held_out/$task/validation.jsonl || {
    head -n -1000 DATA/$task/train.jsonl > $out/data/$task/train.jsonl
    head -n 300 DATA/$task/validation.jsonl > $out/data/$task/validation.jsonl
    tail -n 1000 DATA/$task/train.jsonl > $out/held_out/$task/validation.jsonl
  }
done
for task in mrpc rte; do
  python -m experiments.composition --import results.composing examples.mpnet --model $MPNET --data-dir $out/data \
    --test $out/held_out --out $out/$task --target $task --train-examples 400 --seeds 0 1 2 --choose-seeds 5 --jobs ${JOBS:-1} \
    --sources runs/one_source/mnli runs/one_source/qqp runs/one_source/sst2 runs/one_source/scitail \
    --systems fusion mean sum gates scalearn --fusion-options '--lr 2e-4 --epochs 4' '--lr 1e-3 --epochs 4' \
    -- --max-length 128 --batch-size 16 --dtype bfloat16 --import examples.mpnet
done
