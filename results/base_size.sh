#!/bin/sh
# The study on an encoder of BERT-base's size (section 2 of docs/results.md): MPNet-base, as examples/mpnet.py
# downloads it, in bfloat16.
#
#   sh results/base_size.sh sources DATA                 # the adapters that are fused
#   sh results/base_size.sh TARGET SIZE "SEEDS" DATA     # rte 400 "0 1 2", mrpc 400 "0 1 2", cb 250 "0 1 2", rte 2490 0
#   python results/base_size.py runs/base                # rows and figure
#
# DATA: a directory with TASK/train.jsonl and TASK/validation.jsonl. Each command can be stopped; run it again to continue.
# Rows of runs that are not in runs/base stay in base_size.csv: seeds and targets can be run in any order.
set -e
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
common="--max-length 128 --batch-size 16 --device cpu --dtype bfloat16"
model=runs/mpnet sources=runs/base/sources

test -d $model || $python examples/mpnet.py --download $model

if [ "$1" = sources ]; then
    for task in mnli qqp sst2 scitail; do
        $python examples/mpnet.py --stage adapter --task $task --epochs 1 --model $model --data-dir "$2" \
            --limit-train 10000 --limit-dev 2000 --lr 3e-4 $common --resume --out $sources/$task
    done
    exit
fi

target=$1 size=$2 seeds=$3 data=$4 adapter_lr=5e-4 fusion_lr=5e-4 epochs=4 test=
if [ "$size" = 400 ]; then # the examples that are left over are a test set
    test=--test
elif [ "$size" -gt 1000 ]; then # the paper's learning rate of fusion
    adapter_lr=3e-4 fusion_lr=5e-5
fi
systems=
for more in 'own head_on_mnli fusion fusion_with_own' 'fusion_half fusion_half_control' 'cross head_on_qqp head_on_scitail' \
    'full mean mean_with_own fusion_of_own head_on_sst2 head'; do # results are written after each group
    systems="$systems $more"
    $python -m experiments.composition --target "$target" --train-examples "$size" --seeds $seeds $test \
        --sources $sources/mnli $sources/qqp $sources/sst2 $sources/scitail --data-dir "$data" \
        --model $model --import examples.mpnet,results.weights_by_epoch --systems $systems --jobs 1 --out "runs/base/$target-$size" \
        --adapter-options "--lr $adapter_lr --epochs 30 --patience 5" \
        --head-options '--lr 1e-3 --epochs 8 --patience 4' \
        --full-options '--lr 3e-5 --epochs 4 --patience 4' \
        --fusion-options "--lr $fusion_lr --epochs $epochs --patience $epochs" -- $common
done
