"""Certify that no small move of a layer's input changes a decision, and find one that does.

Run: python examples/certify_a_decision.py
"""

import lipscope as ls

# A decision on the mean-pooled output of one layer: which of two texts is nearer?
good = "The film was wonderful, warm and funny; I laughed and would see it again tomorrow."
bad = "The film was dreadful, cold and dull; I yawned and would never see it again."

text = "We loved every minute of this lovely picture, and the actors were a joy to watch. "
at = ls.load_model("minilm").at(text, layer=3, length=8, dtype="float64")
decision = at.decision(between=[good, bad])
print(f"decision: \u201c{decision.answer_name}\u201d, by a margin of {decision.margin:.3f}")

several = {"every token moves": decision.certify("each"), "all move together": decision.certify()}
for moves, found in several.items():
    # The other side: the smallest move found that changes the decision.
    assert found.attack is not None and found.radius < found.attack
    print(f"stands while {moves} by {found.radius:.4f}; changed at {found.attack:.4f}")
