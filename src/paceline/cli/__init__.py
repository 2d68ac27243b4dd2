"""The command `paceline`: one file per verb, imported only when that verb is used."""
