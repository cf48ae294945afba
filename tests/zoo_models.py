"""A tiny random model of every model type of the installed transformers, and an input for it.

Sizes are made small by their names. Sizes that a family does not take together are tried in
turns: the first configuration whose model runs on the first of its inputs is the one.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModel, PreTrainedConfig

from lipscope.models.pretrained import quiet
from lipscope.models.tracing.prepare import exact_maths

WIDTH, HEADS, TOKENS, SIDE = 16, 4, 6, 8
_MOST = 3e7  # parameters of a model that is still small
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width"), WIDTH),
    **dict.fromkeys(("embedding_size", "decoder_hidden_size", "hidden_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("projection_dim", "out_hidden_size", "output_dim", "text_embed_dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_num_attention_heads", "encoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "kv_channels"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "d_inner"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 24),
    **dict.fromkeys(("decoder_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 60),
    "encoder_hash_byte_group_vocab": 60,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), 32),
    **dict.fromkeys(("max_target_positions", "n_ctx", "seq_length"), 32),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"), 1),
    **dict.fromkeys(("cls_token_id", "decoder_start_token_id", "unk_token_id"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("image_size", "patch_size"), 0),  # what is asked for
    "window_size": 2,
    "num_groups": 4,
    "num_mel_bins": 16,
    "num_time_features": 2,
    "num_frames": 2,
    "num_labels": 2,
}
# Further sizes, for models that are not small without them.
_WIDE = re.compile(
    r"width|dim|channel|filter|hidden|_size$|_sizes$|planes|inner|rank|features|expert|ffn"
)
_NOT_WIDE = re.compile(
    r"kernel|stride|patch|image|window|ratio|dilation|vocab|chunk|batch|dropout|position|token"
    r"|num_channels|in_channels|in_chans|audio_channels|rope|conv|group|pool|multiple|index|out_"
)
_DEEP = re.compile(r"depths?$|layers$|blocks$|_repeats?$|repeats$")
_HEADS = re.compile(r"heads")
# Sizes that some families do not take together: the first configuration that runs is used.
_WITHOUT: tuple[tuple[str, ...], ...] = (
    (),
    ("layer_types",),
    ("num_key_value_heads", "num_kv_heads", "layer_types"),
    ("head_dim", "num_key_value_heads", "num_kv_heads", "layer_types"),
    ("num_layers", "num_hidden_layers", "n_layer", "layer_types"),
    ("pad_token_id", "bos_token_id", "eos_token_id", "layer_types"),
    ("hidden_size", "embed_dim", "num_attention_heads", "num_heads", "layer_types"),
)
# Sides of a picture and of its patches, None for its own; whether all sizes are made small.
_RESNET = {"model_type": "resnet", "embedding_size": WIDTH, "hidden_sizes": [WIDTH] * 4}
_RESNET |= {"depths": [1] * 4, "layer_type": "basic", "out_features": ["stage4"]}
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET}
_LEVELS = {"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]}
_RT_DETR = {"backbone_config": {**_RESNET, **_LEVELS}, "encoder_in_channels": [WIDTH] * 3}
_RT_DETR |= {"decoder_in_channels": [WIDTH] * 3, "num_queries": 4}
_SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]}
_MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
_SERIES = {"prediction_length": 2, "context_length": 6, "lags_sequence": [1, 2]}
_STAGES = {"out_features": [f"stage{i}" for i in (1, 2, 3, 4)], "out_indices": [1, 2, 3, 4]}
_BEHIND = {"out_features": _STAGES["out_features"][1:], "out_indices": [2, 3, 4]}
_HGNET = {"backbone_config": _BEHIND, "encoder_in_channels": [WIDTH] * 3, "num_queries": 4}
_HGNET |= {"decoder_in_channels": [WIDTH] * 3}
# Networks of convolutions whose sizes are products, and those with norms of 32 groups.
_FEW_FILTERS = {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}
_FEW_CHANNELS = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
_FEW_RATIOS = {"num_filters": 8, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_OWN: dict[str, dict[str, Any]] = {  # what single model types need besides, in parts too
    "align": {"projection_dim": 32, "vision_config": _FEW_FILTERS},
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "audio-spectrogram-transformer": {"max_length": 24},
    "autoformer": _SERIES,
    "bamba": _MAMBA,
    "bridgetower": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "blip-2": {"num_query_tokens": 1, "image_token_index": 5},
    "chameleon": {"vocabulary_map": {"<image>": 2}},
    "clap": {"audio_config": {"spec_size": 64, "num_mel_bins": 32, "hidden_size": 128,
                              "patch_embeds_hidden_size": 16}},
    "clvp": {"text_config": {"hidden_size": 128, "projection_dim": 128},
             "speech_config": {"hidden_size": 128, "projection_dim": 128}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    "conditional_detr": _DETR,
    "cvt": {"depth": [1, 2, 3]},
    "d_fine": _HGNET,
    "dab-detr": _DETR,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 100.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "deformable_detr": {**_DETR, "d_model": 64},
    "deimv2": _HGNET,
    "detr": _DETR,
    "dia": {"delay_pattern": [0]},
    "dia_decoder": {"num_channels": 1, "cross_num_attention_heads": 4,
                    "cross_hidden_size": 16, "cross_num_key_value_heads": 4,
                    "cross_head_dim": 4},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2,
                                        "moe_intermediate_size": 24}},
    "efficientloftr": {"hidden_size": WIDTH, "stage_num_blocks": [1] * 4,
                       "out_features": [WIDTH] * 4, "stage_stride": [2, 1, 2, 2],
                       "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                           "partial_rotary_factor": 2.0}},
    "efficientnet": _FEW_FILTERS,
    "emu3": {"vocabulary_map": {"<image>": 2}, "vq_config": _FEW_CHANNELS,
             "text_config": {"pad_token_id": 1}},
    "ernie4_5_vl_moe": {"text_config": {"num_attention_heads": 2,
                                        "rope_parameters": {**_SECTIONS,
                                                            "mrope_section": [1, 1, 2]}}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [1, 1], "d_head": 4,
               "num_decoder_layers": 1},
    "gemma3n_text": {"intermediate_size": [24, 24], "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.0, 0.0],
                     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60,
                     "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60},
    "glm46v_text": {"rope_parameters": _SECTIONS},
    "glm4v_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 0, 0]}},
    "glm4v_text": {"rope_parameters": _SECTIONS},
    "glm5_next_text": {"qk_rope_head_dim": 0, "linear_num_heads": 2,
                       "linear_head_dim": 4, "index_n_heads": 2, "index_head_dim": 4},
    "glm_image_text": {"rope_parameters": _SECTIONS},
    "glm_ocr_text": {"rope_parameters": _SECTIONS},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1],
                        "downsample_rate": "1/2", "vision_config": {"hidden_size": 64}},
    "granitemoehybrid": _MAMBA,
    "grounding-dino": {**_DETR, "d_model": 64, "num_queries": 4},
    "hgnet_v2": {"stem_channels": [3, 8, WIDTH], "stage_in_channels": [WIDTH] * 4,
                 "stage_mid_channels": [8] * 4, "stage_out_channels": [WIDTH] * 4,
                 "stage_numb_of_layers": [1] * 4},
    "hunyuan_vl_text": {"rope_parameters": _SECTIONS},
    "informer": _SERIES,
    "instructblip": {"num_query_tokens": 1, "image_token_index": 5},
    "instructblipvideo": {"num_query_tokens": 1, "video_token_index": 5},
    "janus": {"vq_config": _FEW_CHANNELS},
    "kosmos-2": {"latent_query_num": 1},
    "kosmos_2_text_model": {"attention_heads": 4},
    "kyutai_speech_to_text": {"codebook_vocab_size": 20, "audio_pad_token_id": 19},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "longcat_flash": {"ffn_hidden_size": 24, "expert_ffn_hidden_size": 24, "zero_expert_num": 1,
                      "num_layers": 1, "num_hidden_layers": 2},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "lw_detr": {"backbone_config": {"num_windows": 1, "num_windows_side": 1},
                "projector_scale_factors": [1.0], "num_queries": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "mask2former": {"backbone_config": _STAGES, "feature_size": 32,
                    "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 4},
    "mimi": {"upsample_groups": 16},
    "mimi_decoder": {"upsample_groups": 16},
    "mm-grounding-dino": {**_DETR, "d_model": 64, "num_queries": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "exaone4_5_vision": {"window_size": 16},
    "muse_glimmer_assistant": {"target_layer_ids": [0]},
    "muse_spark": {"projector_hidden_size": WIDTH, "text_config": {"moe_hidden_size": WIDTH}},
    "muse_spark_audio": {"hidden_sizes": [WIDTH] * 4, "depths": [1] * 4, "num_hidden_layers": 4},
    "nemo_speechlm": {"text_config": {"n_groups": 1}},
    "oneformer": {"conv_dim": 32, "hidden_dim": 32, "mask_dim": 32, "task_seq_len": TOKENS,
                  "backbone_config": _STAGES, "num_queries": 4},
    "patchtsmixer": {"context_length": 32, "patch_length": 8, "patch_stride": 8},
    "patchtst": {"context_length": 32, "patch_length": 8, "patch_stride": 8},
    "perceiver": {"d_latents": 16, "num_latents": 5, "num_self_attends_per_block": 2,
                  "num_cross_attention_heads": 2, "num_self_attention_heads": 2,
                  "d_model": 16, "max_position_embeddings": 32},
    "pp_doclayout_v3": {**_HGNET, "backbone_config": _STAGES},
    "pp_doclayout_v4": _HGNET,
    "pp_ocrv6_small_rec": {"backbone_config": {"stem_channels": [3, 48, 96]}},
    "pp_ocrv6_tiny_rec": {"backbone_config": {"stem_channels": [3, 48, 96]}},
    "pvt": {"image_size": 32, "sequence_reduction_ratios": [2, 2, 1, 1]},
    "qwen2_5_omni_text": {"rope_parameters": _SECTIONS},
    "qwen2_5_vl_vision": {"window_size": 16},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen4_exp": {"text_config": {"layer_types": ["linear_attention", "indexed_attention"],
                                  "indexer_n_heads": 2, "indexer_kv_heads": 1,
                                  "indexer_head_dim": 4, "indexer_budget": 4,
                                  "indexer_compress_ratio": 2}},
    "reformer": {"axial_pos_embds_dim": [8, 8], "attn_layers": ["local", "lsh"], "num_buckets": 2,
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "rf_detr_dinov2": {"num_windows": 1},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "sam2": {"vision_config": {"fpn_hidden_size": WIDTH,
                               "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
             "prompt_encoder_config": {"image_size": 64, "patch_size": 16}},
    "sam2_hiera_det_model": {"embed_dim_per_stage": [16, 32, 48, 64],
                             "window_size_per_stage": [2, 2, 2, 2]},
    "sam2_vision_model": {"backbone_channel_list": [64, 48, 32, 16]},
    "sam3_tracker": {"vision_config": {"fpn_hidden_size": WIDTH,
                                       "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]}},
    "seamless_m4t": {"upsample_initial_channel": 64},
    "seamless_m4t_v2": {"upsample_initial_channel": 64},
    "seggpt": {"image_size": [16, 8]},
    "step3p5": {"sliding_window": 4},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "table-transformer": _DETR,
    "textnet": {"stem_out_channels": WIDTH},
    "time_series_transformer": _SERIES,
    "tvp": {"backbone_config": _RESNET, "max_img_size": 64, "visual_prompt_size": 2},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "vibevoice_acoustic_tokenizer": _FEW_RATIOS,
    "vibevoice_acoustic_tokenizer_decoder": _FEW_RATIOS,
    "vibevoice_acoustic_tokenizer_encoder": _FEW_RATIOS,
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
_WAYS = ((SIDE, 4, False), (SIDE, 4, True), (64, None, True))


def model_of(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with its inputs, from the first configuration that runs."""
    unbuilt: Exception | None = None
    failed: Exception | None = None
    for configure in _configurations(kind):
        try:
            model = _built(configure())
        except (ImportError, TimeoutError):
            raise
        except Exception as problem:
            unbuilt = unbuilt or problem
            _say("build", problem)
            continue
        for inputs in inputs_of(model):
            try:
                run(model, inputs)
            except TimeoutError:
                raise
            except Exception as problem:
                failed = failed or problem
                _say("run", problem, {n: tuple(v.shape) for n, v in inputs.items()})
            else:
                return model, inputs
    raise failed or unbuilt or ValueError("no configuration")


def _say(*what: object) -> None:
    """What was tried, where ``V`` is set: to find out what a model type needs."""
    if os.environ.get("V"):
        print("  ", *(repr(one)[:150] for one in what))


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """The model's answer, in float64 and without a cache."""
    takes = inspect.signature(model.forward).parameters
    # Beside its weights, a float32 mask times the least float64 would be infinite (TimesFM).
    inputs = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    with exact_maths(torch.float64):
        return model(**inputs, **{k: False for k in ("use_cache",) if k in takes})


def _configurations(kind: str) -> Iterator[Callable[[], Any]]:
    """Ways to configure a model type, the most usual one first."""
    built = CONFIG_MAPPING[kind]
    for side, patch, all_small in _WAYS:
        for without in _WITHOUT[:3] if all_small else _WITHOUT:
            yield lambda w=without, s=side, p=patch, a=all_small: shrunk(built, w, s, p, a)


def shrunk(
    kind: Any, without: tuple[str, ...], side: int, patch: int | None, all_small: bool
) -> Any:
    """A configuration with every size that is known by its name made small."""
    default = kind()
    held = {**default.to_dict(), **vars(default)}
    names = set(inspect.signature(kind.__init__).parameters) | set(held)
    known = {**_SIZES, "image_size": side, "patch_size": patch}
    if "kv_lora_rank" in names:  # latent keys are made anew for every head
        known |= {"num_key_value_heads": HEADS, "num_kv_heads": HEADS}
    sizes: dict[str, Any] = {}
    for name, size in known.items():
        usual = held.get(name, 1)
        if name in names and name not in without and isinstance(usual, int | None) and size:
            sizes[name] = size
        elif name in ("image_size", "patch_size") and isinstance(usual, list | tuple) and size:
            sizes[name] = [size] * len(usual)
    for name, usual in held.items():
        if name not in sizes and name not in without and name in names:
            every = all_small or isinstance(usual, list | tuple)
            small = _small(name, usual) if every else usual
            if small is not usual and small != usual:
                sizes[name] = small
    for name, part in getattr(kind, "sub_configs", {}).items():
        inner = vars(default).get(name)
        if inner is not None and inspect.isclass(part) and hasattr(inner, "to_dict"):
            sizes[name] = _inside(inner, without, side, patch, all_small)
    rope = vars(default).get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        sizes["rope_parameters"] = {**rope, "mrope_section": [1, 1, 0]}  # of half a head
    given = vars(default).get("layer_types")
    if "num_hidden_layers" in sizes and isinstance(given, list) and "layer_types" not in without:
        kinds = sorted(dict.fromkeys(given), key=lambda kind: "attention" not in kind)
        sizes["layer_types"] = [*kinds[:2], *kinds][:2]  # two kinds, one of them attention
    for name, usual in held.items():
        numbered = isinstance(usual, dict) and usual and all(str(key).isdigit() for key in usual)
        if numbered and name != "id2label":
            sizes[name] = {}  # what is told of single layers
    sizes = _joined(sizes, _OWN.get(kind.model_type, {}))
    while True:
        try:
            return kind(**sizes)
        except Exception as problem:  # a size that it names is left as it was
            named = [name for name in sizes if re.search(rf"\b{name}\b", str(problem))]
            if not named:
                raise
            for name in named:
                del sizes[name]


def _joined(sizes: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Sizes with those of a table; a part that is not told its type keeps what it has besides."""
    joined = dict(sizes)
    for name, new in own.items():
        part = name.endswith("_config") and "model_type" not in new
        held = sizes.get(name) if part else None
        joined[name] = _joined(held, new) if isinstance(held, dict) else new
    return joined


def _inside(inner: PreTrainedConfig, *options: Any) -> Any:
    """A part's configuration made small; a network of another package stays what it is."""
    if inner.model_type.startswith("timm"):
        return inner
    return shrunk(type(inner), *options).to_dict()


def _small(name: str, usual: Any) -> Any:
    """A size or a list of sizes made small, by its name."""
    if isinstance(usual, list | tuple) and usual and all(type(v) is int for v in usual):
        return type(usual)(_small(name, v) for v in usual)
    if type(usual) is not int:
        return usual
    if _HEADS.search(name):
        return min(usual, 2)
    if _DEEP.search(name):
        return min(usual, 2)
    if _WIDE.search(name) and not _NOT_WIDE.search(name):
        return min(usual, WIDTH)
    return usual


def _built(config: Any) -> nn.Module:
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(p.numel() for p in _of(config).parameters())
        if count > _MOST:
            raise ValueError(f"{count:.1e} parameters: the configuration is not small")
        model = _of(config, attn_implementation="eager")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        convolved = {id(m.weight): m.weight[0].numel() for m in model.modules() if _convolves(m)}
        for p in model.parameters():
            # Larger weights, so that attention is not flat, and no norm or bias at its start.
            entering = convolved.get(id(p), p.shape[-1] if p.ndim else 1)
            p.data += torch.randn(p.shape) * (0.2 if p.ndim < 2 else entering**-0.5)
    return model.double().eval().requires_grad_(False)


def _of(config: Any, **options: Any) -> Any:
    """The model that `AutoModel` names, which may take one part of the configuration only."""
    named: Any = MODEL_MAPPING.get(type(config), None)
    if inspect.isclass(named):
        taken: Any = inspect.signature(named.__init__).parameters["config"].annotation
        for part in vars(config).values():
            if type(part) is taken:
                return named._from_config(part, **options)
    return AutoModel.from_config(config, **options)


def _convolves(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def inputs_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Samples that the model may take: what it says it reads first, then whatever it can read."""
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    gen = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def size(name: str, otherwise: int, of: Any = config) -> int:
        value = getattr(of, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if isinstance(value, int) else otherwise

    ids = torch.arange(5, 5 + TOKENS)[None]
    vision = getattr(config, "vision_config", config)
    side, patch = size("image_size", SIDE, vision), size("patch_size", 4, vision)
    channels = size("num_channels", size("in_channels", 3, vision), vision)
    merge, frames = size("spatial_merge_size", 2, vision), size("temporal_patch_size", 1, vision)
    pictures = real(1, channels, side, side)
    codes = size("num_codebooks", 1)
    bins = size("num_mel_bins", size("feature_size", 16))
    grid = torch.tensor([[1, 2 * merge, 2 * merge]])
    patches = real(math.prod(grid[0].tolist()), channels * frames * patch**2)
    known = {
        "input_ids": ids,
        "pixel_values": pictures,
        "pixel_values_videos": real(1, size("num_frames", 2), 3, side, side),
        "input_values": real(1, 400),
        "input_features": real(1, bins, 64),
        "attention_mask": torch.ones_like(ids),
        "bbox": torch.arange(4).expand(1, TOKENS, 4) + 1,
        "query_embeds": real(1, TOKENS, size("hidden_size", WIDTH)),
        "encoder_hidden_states": real(1, 4, size("encoder_hidden_size", WIDTH)),
        "qformer_input_ids": ids,
        "past_values": real(1, 8),
        "past_time_features": real(1, 8, 2),
        "past_observed_mask": torch.ones(1, 8),
        "future_values": real(1, 2),
        "future_time_features": real(1, 2, 2),
        "visual_feats": real(1, 3, size("visual_feat_dim", 2048)),
        "visual_pos": real(1, 3, 4),
        "inputs": real(1, TOKENS, size("d_model", WIDTH)),
        "hidden_states": patches,
        "grid_thw": grid,
        "image_grid_thw": grid,
        "image_embeds_position_mask": (ids < 6).long(),
        "pixel_values_images": pictures,
        "audio_mel": real(1, 64, bins),
        "input": pictures,
        "states": real(1, 4, size("state_dim", 17)),
        "actions": real(1, 4, size("act_dim", 4)),
        "rewards": real(1, 4, 1),
        "returns_to_go": real(1, 4, 1),
        "timesteps": torch.arange(4)[None],
        "past_values_padding": torch.zeros(1, 8),
        "freq": torch.zeros(1, 1, dtype=torch.long),
        "merge_sizes": torch.tensor([merge]),
        "task_inputs": ids,
    }
    time = [name for name in takes if re.fullmatch(r"(input_features|audio_mel)_mask", name)]
    known |= dict.fromkeys(time, torch.ones(1, 64, dtype=torch.bool))
    main = getattr(model, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, list) else main
    main = main if main in takes else next(iter(takes))
    more: dict[str, Tensor] = {}
    if "noise" in takes:  # what ViTMAE hides is drawn anew in every call
        more["noise"] = torch.arange(4.0)[None].double()
    if "decoder_input_ids" in takes:
        more["decoder_input_ids"] = ids[:, :4]
    needed = {main, *(n for n, p in takes.items() if p.default is p.empty)}
    if main == "pixel_values" and "input_ids" in takes:
        needed.add("input_ids")
    both = {"input_ids", "pixel_values", "bbox", "input_features", "encoder_hidden_states"}
    both |= {"visual_feats", "visual_pos", "past_time_features", "past_observed_mask"}
    both |= {"future_values", "future_time_features", "image_embeds_position_mask"}
    other: dict[str, list[dict[str, Tensor]]] = {  # shapes in which some take their samples
        "pixel_values": [
            {"pixel_values": real(1, channels, 64, 64)},
            {"pixel_values": real(1, 2, channels, side, side)},
            {"pixel_values": patches, "grid_thw": grid, "image_grid_thw": grid},
            {"pixel_values": patches[None, :4], "pixel_attention_mask": torch.ones(1, 4),
             "spatial_shapes": torch.tensor([[2, 2]]),
             "pixel_position_ids": torch.cartesian_prod(*[torch.arange(2)] * 2)[None]},
            {"pixel_values": patches[:4].reshape(4, channels, -1, patch), "grid_hws": grid[:, 1:]},
            {"pixel_values": real(1, channels, 128, 128)},
        ],
        "input_ids": [{"input_ids": ids[..., None].expand(1, TOKENS, codes + 1)}],
        "past_values": [
            {"past_values": real(1, 64), "past_values_padding": torch.zeros(1, 64)},
            {"past_values": real(1, size("context_length", 32), size("num_input_channels", 1))}
        ],
        "input_features": [
            {"input_features": real(1, 64, bins)},
            {"input_features": real(1, 128, bins)},
            {"input_features": real(bins, 64), "feature_lens": torch.tensor([64])},
        ],
        "input_values": [
            {"input_values": real(1, size("max_length", 1024), size("num_mel_bins", 128))},
            {"input_values": real(1, 1, 400)},
            {"input_values": real(1, 1600)},
            {"input_values": real(1, 1, 3200)},
            {"input_values": real(1, TOKENS, size("hidden_size", WIDTH)),
             "decoder_input_values": real(1, 4, size("hidden_size", WIDTH))},
        ],
    }  # fmt: skip
    # What only few types take is tried last, and drawn last.
    windows = size("n_window", 50) * 2
    square = torch.cartesian_prod(*[torch.arange(3)] * 2)[None]
    width, heard = size("hidden_size", WIDTH), torch.ones(1, 64, dtype=torch.bool)
    stacked = bins * size("num_stacked_frames", 1)
    mels = size("num_mel_bins", bins, getattr(config, "audio_config", config))
    known |= {
        "image_attention_mask": torch.ones(1, TOKENS, 1),
        "context_hidden_states": real(1, TOKENS, width),
        "noise_embeds": real(1, TOKENS, width),
        "action_embeds": real(1, 4, width),
    }
    rare = {"actions", "rewards", "returns_to_go", "timesteps", "image_attention_mask"}
    last: dict[str, list[dict[str, Tensor]]] = {
        "input_ids": [{"input_ids": ids.expand(codes, TOKENS)}],
        "states": [{}],
        "pixel_values": [
            {"pixel_values": real(1, 2, channels, side, side)},
            {"pixel_values": real(1, 1, channels, side, side)},
            {"pixel_values": real(1, 2, channels, 64, 64)},
            {"pixel_values": real(1, channels, 64, 64)},
            {"pixel_values": real(1, 9, channels * patch**2), "pixel_position_ids": square},
            {"pixel_values": real(1, 3, 8, 8), "prompt_pixel_values": real(1, 3, 8, 8),
             "prompt_masks": real(1, 3, 8, 8)},
            {"pixel_values": patches.reshape(len(patches), -1, patch, patch), "grid_thw": grid},
            {"pixel_values": patches.repeat(1, 2), "grid_thw": grid},
            {"pixel_values": real(1, channels, patch, 4 * patch),
             "target_sizes": torch.tensor([[2, 2]])},
            {"pixel_values": real(4, patch * merge, patch * merge, channels),
             "image_grid_thw": torch.tensor([[1, 2, 2]])},
        ],
        "inputs_embeds": [{"inputs_embeds": real(1, TOKENS, width)}],
        "context_hidden_states": [{}],
        "hidden_states": [
            {"hidden_states": real(1, width, TOKENS)},
            {"hidden_states": real(1, 1, 400)},
        ],
        "action_embeds": [
            {"pixel_values": pictures[None], "pixel_attention_mask": torch.ones(1, 1).bool()}
        ],
        "latents": [{"latents": real(1, width, TOKENS)}],
        "input_values": [{"input_values": real(1, 1920)}],
        "input_features": [
            {"input_features": real(1, 64, 128)},
            {"input_features": real(1, 80, 64)},
            {"input_features": real(1, bins, 48)},
            {"input_features": real(1, 1, 64, mels)},
            {"input_features": real(1, bins, 64), "input_features_mask": heard},
            {"input_features": real(1, 8, stacked), "input_features_mask": heard[:, :8]},
            {"input_features": real(1, bins, windows),
             "input_features_mask": torch.ones(1, windows, dtype=torch.bool)},
        ],
    }  # fmt: skip
    for names, ways in ((needed, other), (needed | both, other), (needed | both | rare, last)):
        chosen = {n: known[n] for n in takes if n in names and n in known} or {main: ids}
        usual = [{}] if ways is other else []
        for way in (*usual, *(way for n in ways if n in chosen for way in ways[n])):
            yield {**chosen, **{n: v for n, v in way.items() if n in takes}, **more}
