"""dcollrun: starts a job with the MPI at hand. `dcollrun --help` and docs/migration.md tell what it takes."""
