"""Wide data with few causes: where do fewer coordinates suffice? Data, a fast simulator, the study, its figure."""
