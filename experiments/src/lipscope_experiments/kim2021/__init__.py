"""Kim, Papamakarios and Mnih (2021), "The Lipschitz Constant of Self-Attention"."""
