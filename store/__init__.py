"""The database, once: tables, migrations, and queries named for what they do. Knows neither web nor worker."""
