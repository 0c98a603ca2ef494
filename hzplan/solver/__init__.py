"""The planner: patterns per unit, the ILP over them, the search, and the plan that comes out."""
