"""From texts to scores: reward sources and the judge, each sample's fault its own."""
