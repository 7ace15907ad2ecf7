"""How good the parts are, measured on sets that anybody can rebuild."""
