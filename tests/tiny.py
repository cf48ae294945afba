"""Tiny random models of several families, small enough for dense Jacobians."""

from __future__ import annotations

import torch
from torch import nn

from lipscope.models import LoadedModel, load_model

TINY = {
    "bert": "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16,"
    "vocab_size=300",
    "gpt2": "n_embd=12,n_head=3,n_layer=2,n_positions=64,vocab_size=300",
    "llama": "hidden_size=12,num_attention_heads=6,num_key_value_heads=2,num_hidden_layers=2,"
    "intermediate_size=16,vocab_size=300",
    "qwen3": "hidden_size=12,num_attention_heads=3,num_key_value_heads=1,num_hidden_layers=2,"
    "intermediate_size=16,vocab_size=300,head_dim=4",
    "mistral": "hidden_size=12,num_attention_heads=3,num_key_value_heads=1,num_hidden_layers=2,"
    "intermediate_size=16,vocab_size=300,head_dim=4,sliding_window=3",
    "roberta": "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16,"
    "vocab_size=300",
    "distilbert": "dim=12,n_heads=3,n_layers=2,hidden_dim=16,vocab_size=300",
    "gemma2": "hidden_size=12,num_attention_heads=3,num_key_value_heads=1,num_hidden_layers=2,"
    "intermediate_size=16,vocab_size=300,head_dim=4",
    # No closed form is known for it: the generic path.
    "olmo": "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16,"
    "vocab_size=300,pad_token_id=0,eos_token_id=2",
    "mpnet": "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16,"
    "vocab_size=300",
}

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 20


def tiny(family: str, seed: int = 0, scale: float = 8.0) -> LoadedModel:
    """A random model whose attention weights are scaled up, so that attention is not flat."""
    loaded = load_model(f"random:{family}:{TINY[family]}", seed=seed)
    for name, p in loaded.model.named_parameters():
        if p.ndim == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
            p.data *= scale
    return loaded


def encoder(*, batch_first: bool = True, dropout: float = 0.0) -> nn.TransformerEncoder:
    """Torch's own layers: a model that transformers does not know."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for p in model.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.8)
    return model
