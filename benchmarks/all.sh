#!/bin/sh
# The figures of README and docs, into the folder $1: a GPU with Transformer Engine, TRL, flash-linear-attention and
# pytest. It takes about 30 minutes, and those of soak, parity, random runs and the journeys, and 25 for hybrids and
# experts; with a second GPU more. Nothing else may run beside it.
set -u
out=${1:?usage: benchmarks/all.sh FOLDER}
cd "$(dirname "$0")/.." && mkdir -p "$out" && export PYTHONPATH=.
bench="python3 -m te_models bench --peers torch,torchao,te-layer --recipes delayed+plain+no_edges,delayed+no_edges,delayed+no_edges+graph,delayed,delayed+graph"

$bench --preset gated-1b --batch-size 8 --seq-len 2048 --out "$out/step_1b"
$bench --preset gated-8b --num-hidden-layers 4 --num-key-value-heads 32 --batch-size 4 --seq-len 4096 --out "$out/step_8b4"
$bench --preset gated-350m --batch-size 16 --seq-len 2048 --out "$out/step_350m"
$bench --preset gated-896 --num-hidden-layers 31 --batch-size 16 --seq-len 2048 --out "$out/step_454m"
python3 -m te_models bench --preset gated-350m --recipes bf16+graph,delayed+no_edges+graph --peers torch --batch-size 1 --seq-len 2048 \
    --steps 25 --out "$out/step_350m_b1"
for way in delayed+no_edges delayed+selective+no_edges; do
    python3 benchmarks/profile_step.py gated-1b $way --out "$out/profile_1b_$way.json"
done
python3 benchmarks/profile_step.py gated-8b delayed+no_edges --layers 4 --kv-heads 32 --batch-size 4 --seq-len 4096 --out "$out/profile_8b4.json"
python3 benchmarks/whole_step.py speed gated-896 delayed --batch-size 16 --seq-len 1024 --accumulation 1,8,8-eager --out "$out/accumulation_896.json"
python3 benchmarks/whole_step.py speed gated-1b delayed --accumulation 1,8 --micro-batches 8 --out "$out/accumulation_1b.json"
python3 benchmarks/whole_step.py speed gated-1b delayed --accumulation 1 --out "$out/whole_step_1b.json"
python3 benchmarks/whole_step.py profile gated-1b delayed > "$out/whole_step_1b.txt"
python3 benchmarks/whole_step.py first gated-1b delayed > "$out/first_steps_1b.txt"
python3 benchmarks/engine_gpu.py "$out/engine_gpu.json"
python3 -m benchmarks.checkpoint_grid run --peers torch,torchao --out "$out/checkpoint_grid.json"
python3 -m benchmarks.recompute_detection --out "$out/recompute_detection.json"
for shape in 350m 454m; do python3 -m benchmarks.compiled_fp8 --shape $shape --out "$out/compiled_fp8_$shape.json"; done
for shape in 124m 1b; do python3 -m benchmarks.optimizer_speed --shape $shape --out "$out/optimizer_speed_$shape.json"; done
python3 -m benchmarks.no_speed_up --out "$out/no_speed_up.json"
python3 -m benchmarks.optimizer_study run --folder "$out/optimizer_study" --out "$out/optimizer_study.json" --per-gpu 4 --mps
python3 -m benchmarks.gated_learning_rates run --folder "$out/gated" --out "$out/gated_learning_rates.json" --per-gpu 4 --mps
python3 -m benchmarks.gated_learning_rates more --folder "$out/gated_more" --out "$out/gated_learning_rates_more.json" --per-gpu 4 --mps
python3 benchmarks/generate.py run --out "$out/generate.json"
python3 benchmarks/generate.py tokens --rival qwen3-1.7b --out "$out/tokens.json"
python3 benchmarks/finetune_against_trl.py run --out "$out/finetune_against_trl.json"
python3 benchmarks/span_attention.py --out "$out/span_attention.json"
python3 -m benchmarks.attention_kernels --out "$out/attention_kernels.json"
python3 -m benchmarks.fused_families --out "$out/fused_families.json"
python3 -m benchmarks.head_casts --out "$out/head_casts.json"
python3 -m benchmarks.decode_tiles --out "$out/decode_tiles.json"
python3 -m benchmarks.decode_attention --out "$out/decode_attention.json"
te-models bench --preset gated-1b --vocab-size 32000 --hidden-size 2560 --num-hidden-layers 10 --num-attention-heads 32 \
    --num-key-value-heads 8 --head-dim 80 --intermediate-size 6912 --attention-gate none --batch-size 2 --seq-len 6144 \
    --max-position-embeddings 8192 --recipes bf16+graph,delayed+no_edges+graph,current+no_edges+graph \
    --peers torch,torchao --out "$out/heads_80"
hybrid="te-models bench --preset qwen3.5-4b --num-hidden-layers 8 --vocab-size 32768 --max-position-embeddings 65536"
$hybrid --batch-size 2 --seq-len 6144 --steps 11 --out "$out/hybrid" \
    --recipes bf16+graph,delayed+no_edges+graph,current+no_edges+graph,blockwise+no_edges+graph
FLA_FLASH_QLA=0 $hybrid --batch-size 2 --seq-len 6144 --steps 11 --out "$out/hybrid_without_flash_qla" \
    --recipes bf16+graph,delayed+no_edges+graph,current+no_edges+graph,blockwise+no_edges+graph
$hybrid --batch-size 1 --seq-len 65536 --steps 5 --warm-up 2 --recipes bf16+full,delayed+full,current+full --out "$out/hybrid_65536"
for way in bf16 delayed+no_edges; do # each beside torch: with both, memory does not suffice
    te-models bench --preset gated-1b --attention-gate none --max-position-embeddings 32768 --batch-size 1 --seq-len 32768 \
        --steps 5 --recipes $way+graph --peers torch --out "$out/long_${way%+no_edges}"
done
python3 benchmarks/fast_and_plain.py --seeds 12 --processes 6 --out "$out/fast_and_plain.json"
python3 benchmarks/checkpoint_parity.py --out "$out/checkpoint_parity.json"
for exact in "" --deterministic; do
    python3 benchmarks/checkpoint_parity.py --steps 200 --attention own --seq-len 256 --processes 14 --every 10 $exact \
        --out "$out/checkpoint_parity_own$exact.json"
done
python3 benchmarks/engine_parity.py --out "$out/engine_parity.json"
python3 benchmarks/resume_parity.py --out "$out/resume_parity.json"
python3 -m benchmarks.serving_parity --model gated-nano --out "$out/serving_parity.json"
python3 benchmarks/soak.py --out "$out/soak.json" --figure "$out/soak.png"
python3 benchmarks/calibration.py --out "$out/calibration.json"
python3 -m benchmarks.delta_rule_kernels --out "$out/delta_rule_kernels.json"
python3 benchmarks/delta_rule_tuning.py --heads 16x32 --out "$out/delta_rule_fixed.json"
python3 benchmarks/kinds_speed.py --seconds 1500 --out "$out/kinds.json"
python3 benchmarks/expert_profile.py --profile --out "$out/expert_profile.json"
python3 -m benchmarks.speed_map
python3 benchmarks/expert_products.py --out "$out/expert_products.json"
python3 benchmarks/lora_experts.py --out "$out/lora_experts.json"
python3 benchmarks/twin_curves.py --out "$out/twin_curves.json"
python3 benchmarks/random_runs.py --count 150 --seed 1 --out "$out/random_runs.json"
TE_MODELS_RESULTS="$out/journeys.json" python3 -m pytest -q -m gpu tests/test_journeys.py

[ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ] || exit 0
python3 benchmarks/expert_parallel.py --out "$out/expert_parallel.json"
for way in fsdp ddp; do
    torchrun --nproc-per-node 2 benchmarks/whole_step.py parity gated-350m delayed --num-hidden-layers 6 --batch-size 2 --seq-len 512 --parallel $way
    torchrun --nproc-per-node 2 benchmarks/whole_step.py speed gated-896 delayed --batch-size 16 --seq-len 1024 \
        --accumulation 1,8,8-eager --parallel $way --out "$out/accumulation_896_$way.json"
done
python3 benchmarks/random_runs.py --count 150 --seed 2 --gpus 2 --out "$out/random_runs_x2.json"
long="speed gated-1b delayed --batch-size 1 --seq-len 131072 --num-hidden-layers 16 --parallel fsdp --accumulation 1-eager \
  --warm-up 1 --rounds 2 --micro-batches 1"
full='{"activation_checkpointing":"full"}'
torchrun --nproc-per-node 2 benchmarks/whole_step.py $long --model-options $full --context-parallel-size 2 --out "$out/context_parallel_2.json"
two="torchrun --nproc-per-node 2 benchmarks/scaling.py run --recipe delayed"
lean="--no-reshard --reduce-dtype bfloat16"
experts='moe={"num_experts":128,"num_experts_per_tok":8,"moe_intermediate_size":768}'
experts="--preset gated-moe-nano --batch-size 4 --seq-len 4096 --shape vocab_size=32000 hidden_size=2048 head_dim=128 \
  num_hidden_layers=4 num_attention_heads=32 num_key_value_heads=4 max_position_embeddings=4096 $experts"
experts="--recipe bf16,current --parallel fsdp,fsdp+ep $experts"
$two $experts
$two --preset gated-1b --warm-up 7
$two --preset gated-1b --warm-up 7 $lean
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # 121 of 139 GiB
large="--preset llama-3.1-8b --batch-size 1 --seq-len 8192 --no-alone --no-cache --warm-up 1 $lean"
$two $large --accumulation 4 --steps 3
$two $large --accumulation 16 --steps 2
$two $large --accumulation 16 --steps 2 --no-edges
$two $large --accumulation 16 --steps 2 --recipe bf16
cp benchmarks/results/scaling_h200.json "$out/"

[ "$(nvidia-smi --list-gpus | wc -l)" -ge 4 ] || exit 0
four="torchrun --nproc-per-node 4 benchmarks/scaling.py run --recipe delayed"
$four --preset gated-1b --warm-up 7
$four --preset gated-1b --warm-up 7 $lean
$four $experts
torchrun --nproc-per-node 4 benchmarks/whole_step.py $long --model-options $full --context-parallel-size 4 --out "$out/context_parallel_4.json"
torchrun --nproc-per-node 2 benchmarks/lora_sharded.py --out "$out/lora_70b_x2.json"
torchrun --nproc-per-node 4 benchmarks/lora_sharded.py --out "$out/lora_70b_x4.json"
$four $large --accumulation 16 --steps 2
cp benchmarks/results/scaling_h200.json "$out/"
