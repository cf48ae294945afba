"""Rows to charts; one kind of chart is one file.

The only package that imports altair. A chart is saved as SVG, PNG or one HTML page that
needs no network; those of a report (from `focus` on) also live in its page.
"""
