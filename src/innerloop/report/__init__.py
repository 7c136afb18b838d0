"""The page that shows claims beside results: one HTML file, no network, light and dark."""
