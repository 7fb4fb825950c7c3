"""Makes self-contained HTML pages with SVG charts."""
