"""Certify that no small move of a layer's input changes a decision, and find one that does.

Run: python examples/certify_a_decision.py
"""

import lipscope as ls
from lipscope.attacks import attack_decision
from lipscope.certificates.decision import certified_radius
from lipscope.engine.classifier import classifier_of_texts

# A decision on the mean-pooled output of one layer: which of two texts is nearer?
good = "The film was wonderful, warm and funny; I laughed and would see it again tomorrow."
bad = "The film was dreadful, cold and dull; I yawned and would never see it again."
classifier = classifier_of_texts("minilm", [good, bad], layer=3)

text = "We loved every minute of this lovely picture, and the actors were a joy to watch. "
at = ls.load_model("minilm").at(text, layer=3, length=8, dtype="float64")
layer, x = at.attention, at.x

for ball in ("token", "frobenius"):
    proved = certified_radius(layer, x, classifier.weight, bias=classifier.bias, ball=ball)
    if ball == "token":
        name = classifier.names[proved.decision]
        print(f"decision: \u201c{name}\u201d, by a margin of {proved.margin:.3f}")
    # The other side: the smallest move found that changes the decision.
    found = attack_decision(
        layer, x, classifier.weight, bias=classifier.bias, radius=proved.radius, ball=ball
    )
    assert proved.radius < found.radius
    print(
        f"{ball}: stands within {proved.radius:.4f}, {proved.fraction:.2%} of the distance to the "
        f"nearest other token; changed at {found.radius:.4f}"
    )
