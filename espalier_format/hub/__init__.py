"""Checkpoints on the Hub: look at them from afar, publish them, prove that a copy is the one that was made.

``open_remote`` reads configs and headers by range requests, ``verify_remote`` compares a manifest with the Hub's
records, ``upload_checkpoint`` publishes, ``sign_manifest`` and ``check_signature`` sign. Nothing here but ``address``
is imported before it is used: huggingface_hub takes a third of a second.
"""
