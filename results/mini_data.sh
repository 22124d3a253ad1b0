#!/bin/bash
# Makes MINI, the training examples of section 3 of docs/results.md, from DATA.
for task in mnli qqp sst2 imdb scitail boolq mrpc rte cb winogrande hellaswag social_i_qa cosmos_qa commonsense_qa; do
  case $task in winogrande|hellaswag|social_i_qa|cosmos_qa|commonsense_qa) n=300;; *) n=1000;; esac
  mkdir -p MINI/$task && cp DATA/$task/validation.jsonl MINI/$task/
  shuf -n $n --random-source=<(yes) DATA/$task/train.jsonl > MINI/$task/train.jsonl
done
