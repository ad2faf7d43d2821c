"""What proves a part right; today the float64 attention oracle."""
