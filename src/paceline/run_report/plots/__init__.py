"""Plots as inline SVG: one module for each kind. All text that reaches them is escaped already."""
