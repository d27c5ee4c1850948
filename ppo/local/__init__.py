"""The whole platform on one machine: embedded Postgres and Redis, api, worker and reconciler under one data folder."""
