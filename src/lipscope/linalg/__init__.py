"""Linear algebra of Jacobians: operators, the top singular value, its interval and its gradient."""
