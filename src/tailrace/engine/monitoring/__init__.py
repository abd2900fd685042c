"""What an engine shows of itself: metrics, views, and where its log goes."""
