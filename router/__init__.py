"""Which replica gets a request: `trie` (who holds which prefix), `fleet` (last word of each replica), `policy` (the choice),
`serve_router` (the adapter to Ray Serve)."""
