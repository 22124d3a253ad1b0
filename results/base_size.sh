#!/bin/sh
# The study on an encoder of BERT-base's size (section 2 of docs/results.md): MPNet-base, as examples/mpnet.py
# downloads it, in bfloat16.
#
#   sh results/base_size.sh sources DATA                       # the adapters that are fused
#   sh results/base_size.sh TARGET SIZE "SEEDS" DATA           # rte 400 "0 1 2", mrpc 400 "0 1 2", cb 250 "0 1 2", rte 2490 "0 1 2"
#   sh results/base_size.sh more-sources DATA                  # four more adapters
#   sh results/base_size.sh rte 400 "SEEDS" DATA 8-sources     # fused with the first four
#   sh results/base_size.sh TARGET 400 "SEEDS" DATA 8-epochs   # cross-fitting for twice as long
#   sh results/base_size.sh TARGET 400 "SEEDS" DATA low-lr     # the own adapter fused at the paper's learning rate
#   python results/base_size.py runs/base                      # rows and figure
#
# DATA: a directory with TASK/train.jsonl and TASK/validation.jsonl. Each command can be stopped; run it again to continue.
# Seeds and targets can be run in any order, and on several machines: what one command leaves in runs/base are the rows of
# its own seeds and systems, and base_size.py, run after it, keeps all other rows of base_size.csv.
set -e
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
common="--max-length 128 --batch-size 16 --device cpu --dtype bfloat16"
model=runs/mpnet sources=runs/base/sources four="mnli qqp sst2 scitail" more="mrpc boolq imdb cb"

case $1 in
sources | more-sources) : "${2:?DATA is missing}" ;;
*) : "${4:?TARGET, SIZE, SEEDS and DATA are needed: see the head of this file}" ;;
esac
case $5 in
'' | 8-sources | 8-epochs | low-lr) ;;
*) echo "base_size.sh: unknown variant $5" >&2 && exit 2 ;;
esac
test -d $model || $python examples/mpnet.py --download $model

train_source() { # TASK EPOCHS DEV DATA
    $python examples/mpnet.py --stage adapter --task "$1" --epochs "$2" --model $model --data-dir "$4" --limit-train 10000 \
        --limit-dev "$3" --lr 3e-4 $common --resume --out $sources/"$1"
}
if [ "$1" = sources ]; then
    for task in $four; do train_source $task 1 2000 "$2"; done
    exit
elif [ "$1" = more-sources ]; then
    train_source mrpc 3 500 "$2" # 3,668 examples
    train_source boolq 3 500 "$2" # 1,933
    train_source imdb 2 500 "$2" # 3,998
    train_source cb 10 500 "$2" # 250
    exit
fi

target=$1 size=$2 seeds=$3 data=$4 variant=$5
adapter_lr=5e-4 fusion_lr=5e-4 epochs=4 test= fused=$four out=runs/base/$target-$size${variant:+-$variant}
if [ "$size" = 400 ]; then # the examples that are left over are a test set
    test=--test
elif [ "$size" -gt 1000 ]; then # 5e-5 is the paper's learning rate of fusion
    adapter_lr=3e-4 fusion_lr=5e-5
fi
run() { # SYSTEM ...
    $python -m experiments.composition --target "$target" --train-examples "$size" --seeds $seeds $test \
        --sources $(for task in $fused; do echo $sources/$task; done) --data-dir "$data" \
        --model $model --import examples.mpnet,results.weights_by_epoch --systems "$@" --jobs 1 --out "$out" \
        --adapter-options "--lr $adapter_lr --epochs 30 --patience 5" \
        --head-options '--lr 1e-3 --epochs 8 --patience 4' \
        --full-options '--lr 3e-5 --epochs 4 --patience 4' \
        --fusion-options "--lr $fusion_lr --epochs $epochs --patience $epochs" -- $common
}
if [ "$variant" ]; then # over the own adapters of the command without it
    own=runs/base/$target-$size/runs
    test -d "$own" || { echo "base_size.sh: run it without $variant first" >&2 && exit 2; }
    mkdir -p "$out/runs"
    for run in "$own"/own*; do
        new=$out/runs/${run##*/}
        test -e "$new" || { cp -r "$run" "$new.part" && mv "$new.part" "$new"; }
    done
fi
case $variant in
8-sources) fused="$four $more" && run fusion fusion_with_own ;;
8-epochs) epochs=8 && run cross ;;
low-lr) fusion_lr=5e-5 && run fusion_with_own ;;
'')
    systems=
    for group in 'own head_on_mnli fusion fusion_with_own' 'fusion_half fusion_half_control' 'cross head_on_qqp' \
        'full mean mean_with_own fusion_of_own' 'head head_on_scitail head_on_sst2'; do # results are written after each group
        systems="$systems $group"
        run $systems
    done
    ;;
esac
