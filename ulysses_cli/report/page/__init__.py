"""Self-contained HTML pages and their SVG charts."""
