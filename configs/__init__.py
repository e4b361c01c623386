"""Configuration: `schema` says what there is, `load` reads YAML and overrides into it, *.yaml are ready examples."""
