"""The plug-in of verl: engines that save and restore through ray_ckpt."""
