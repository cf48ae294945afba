"""Measure a pretrained encoder on text, and look at one layer more closely.

Run: python examples/first_measurement.py
"""

import lipscope as ls

# Six layers of MiniLM on two passages of the default text, at two lengths.
rows = ls.measure("minilm", lengths=[16, 64], samples=2, rest=True)

print(rows.summary(), "\n")
for layer, n in ((0, 16), (0, 64), (3, 16), (3, 64)):
    sigmas = [row.sigma for row in rows if (row.layer, row.num_tokens) == (layer, n)]
    print(f"layer {layer}, {n:2d} tokens: sigma", ", ".join(f"{s:.2f}" for s in sigmas))

# Is it the scale of the layer's input? Compare the map with and without the norm before it.
for name in ("attention", "normed"):
    row = ls.measure("minilm", layers=[3], lengths=[64], samples=1, map=name)[0]
    print(
        f"{name}: sigma {row.sigma:.2f} in [{row.sigma:.2f}, {row.upper:.2f}], "
        f"relative {row.relative:.1f}, mean token norm {row.radius_rms:.2f}"
    )

# The interval can be made as narrow as wanted, at the price of more products.
for tol in (1e-1, 1e-4):
    row = ls.measure("minilm", layers=[3], lengths=[64], samples=1, tol=tol)[0]
    print(f"tol {tol:g}: [{row.sigma:.4f}, {row.upper:.4f}] after {row.products} products")
