"""Keys of config.json that mean the same in every family of Hugging Face: copied ones, sizes, and ones without effect.

No torch. Facts: the configuration files of transformers 5.23.
"""

# Fields of ModelConfig whose values are copied, most of them under the same key.
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

# Keys whose null means "none" rather than the default.
NULLABLE = (
    "sliding_window",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "q_lora_rank",
    "scale_depth",
    "dim_model_base",
)

# Keys without which no other key can be read.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

# Keys without effect on logits or training: bookkeeping, and defaults of generation and of other heads.
HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "pretraining_tp",
        "tokenizer_class",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "output_scores",
        "torchscript",
        "chunk_size_feed_forward",
        "is_decoder",
        "do_sample",
        "early_stopping",
        "max_length",
        "min_length",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "diversity_penalty",
        "encoder_no_repeat_ngram_size",
        "no_repeat_ngram_size",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "bad_words_ids",
        "begin_suppress_tokens",
        "suppress_tokens",
        "remove_invalid_values",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "model_max_length",
        "tf_legacy_loss",
        "use_bfloat16",
        "keys_to_ignore_at_inference",
        "max_sequence_length",
        "attn_implementation",
        "cache_implementation",
        "is_llama_config",
        "transformers.js_config",
    }
)
