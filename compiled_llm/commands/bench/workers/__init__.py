"""Programs that run in processes of their own and answer `compiled_llm.commands.bench.peer.Peer`."""
