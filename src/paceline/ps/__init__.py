"""The parameter server: tables of parameters on servers, which workers push to and pull from."""
