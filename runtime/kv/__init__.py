"""The KV cache of one rank: how blocks are named, laid out, stored and lent. Not: what is computed into them."""
